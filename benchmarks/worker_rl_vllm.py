"""Generation by vLLM in this process, fp32, of the prompts that the other workers train on; it runs in vLLM's own venv."""

from __future__ import annotations

import json
import os
import pathlib

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip

import torch  # noqa: E402
import vllm  # noqa: E402
from measure import PhaseMeter, leave_world, read_arguments  # noqa: E402


def main() -> None:
    spec, out = read_arguments()
    folder = pathlib.Path(spec["folder"])
    leave_world()
    engine = vllm.LLM(
        model=str(folder / "model"),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        distributed_executor_backend="uni",
    )
    torch.set_num_threads(1)  # vLLM has set it to the number of cores
    sampling = vllm.SamplingParams(n=spec["samples"], max_tokens=spec["new_tokens"], logprobs=0, ignore_eos=True)
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    count = spec["sequences"] // spec["samples"]
    meter = PhaseMeter()
    generate = meter.within("generation", engine.generate)
    for i in range(spec["iterations"]):
        found = generate(prompts[i * count : (i + 1) * count], sampling, use_tqdm=False)
        lengths = [len(completion.token_ids) for request in found for completion in request.outputs]
        meter.metrics.append({"length": sum(lengths) / len(lengths)})
        meter.step()
    meter.write(out)


if __name__ == "__main__":
    main()
