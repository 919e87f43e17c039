"""`mrl serve` as a job of a real Slurm: a client outlives the job's start anew."""

import re
import time

import pytest
import tinker
import yaml

from tests.serve.serving import ADAM, make_model, rows, step
from tests.slurm import slurm_site
from tests.slurm.cluster import free_ports

pytestmark = pytest.mark.nightly
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "1", "--cpus-per-task", "1", "--time", "1:00:00")  # fmt: skip


def url_of(run_dir, job, starts):
    """Where the server listens that the job's start number `starts` made."""
    deadline = time.monotonic() + slurm_site.TIMEOUT_S
    while len(found := re.findall(r"TINKER_BASE_URL=(\S+)", slurm_site.log(run_dir, job))) < starts:
        assert time.monotonic() < deadline, slurm_site.log(run_dir, job)
        time.sleep(0.2)
    return found[-1]


def test_a_preempted_server_goes_on_with_its_clients(site, tmp_path):
    """tp2 on two nodes. The same client goes on after each new start of the job as if nothing had been between its calls;
    a start at which nobody saved anything is followed by another."""
    model, run_dir = make_model(tmp_path / "model"), site.folder / "run"
    config = {
        "output_dir": str(run_dir), "model": {"path": model, "dtype": "float32", "lora": {"rank": 8}},
        "engine": {"device": "cpu", "parallel": {"tp": 2}}, "log": {"console": "plain"},
        "serve": {"max_length": 64, "port": free_ports(1)[0]},
    }  # fmt: skip
    (site.folder / "serve.yaml").write_text(yaml.safe_dump(config))
    job = site.submit("serve", site.folder / "serve.yaml", *TWO_NODES)
    url = url_of(run_dir, job, 1)

    def client():
        made = tinker.ServiceClient(base_url=url, api_key="tml-tests")
        return made.create_lora_training_client(base_model=model, rank=4, seed=9).result()

    undisturbed, stopped = client(), client()
    expected = [step(undisturbed, rows(s)) for s in (1, 2, 3)]
    assert step(stopped, rows(1)) == expected[0]
    passed = stopped.forward_backward(rows(2), "cross_entropy").result()
    site.run("scancel", "--batch", "--signal=USR1", job)
    site.release(job)
    assert url_of(run_dir, job, 2) == url
    norm = stopped.optim_step(ADAM).result().metrics["grad_norm"]
    assert (passed.metrics["loss:sum"], norm) == expected[1]
    site.run("scancel", "--batch", "--signal=USR1", job)
    site.release(job)
    assert url_of(run_dir, job, 3) == url
    assert step(stopped, rows(3)) == expected[2]
    ends = [line for line in slurm_site.history(run_dir, job) if line.startswith("stopped by a signal")]
    assert [line.partition("suspended_")[2].partition("; ")[2] for line in ends] == [
        "back into the queue as restart 1 of 3", "back into the queue as restart 2 of 3",
    ]  # fmt: skip
    said = slurm_site.invoke("status", run_dir).stdout.splitlines()
    assert said[-1] == f"  {run_dir}: serves; 2 models so far, 0 saves"
    site.run("scancel", job)
