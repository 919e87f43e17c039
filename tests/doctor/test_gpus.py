"""GPUs by the words of nvidia-smi, as published logs have them, through a program of that name; and by torch's."""

import pytest

from mrl.doctor import gpus
from tests.doctor.conftest import by_name, printing, program

H100 = "{}, NVIDIA H100 80GB HBM3, 580.65.06, 81559, {}, Disabled"
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tSYS\t0-51\t0\t\tN/A\nGPU1\tNV18\t X \tPXB\tSYS\t0-51\t0\t\tN/A\n"
    "NIC0\tPXB\tPXB\t X \tSYS\t\t\t\t\n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
PCIE = NVLINK.replace("NV18", "PHB")
TORCH = {
    "count": 2, "cuda": "13.0", "hip": None, "sees_gpu": True, "errors": {}, "warnings": [],
    "gpus": [{"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "free": 1, "total": 2}] * 2,
}  # fmt: skip


def smi(folder, rows, *, topology=""):
    """nvidia-smi, which answers each of the questions in its own way."""
    program(
        folder, "nvidia-smi",
        f'case "$*" in\n*index*) {printing(chr(10).join(rows))}\n;;\ntopo*) {printing(topology)}\n;;\nesac',
    )  # fmt: skip


def look(torch=TORCH, environment=None):
    return by_name(gpus.section(gpus.smi(), torch, environment or {}))


def test_two_whole_gpus(programs):
    smi(programs, [H100.format(0, 4), H100.format(1, 4)], topology=NVLINK)
    found = look()
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["gpu"].what == "2 x NVIDIA H100 80GB HBM3 with 80 GiB; driver 580.65.06"
    assert found["gpu.links"].what == "NVLink between GPUs; between which: nvidia-smi topo -m"
    some = look(TORCH | {"count": 1}, environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert some["gpu.seen"].level == "note", "by choice"


def test_what_is_wrong_with_one(programs):
    rows = [
        H100.format(0, 40000).replace("Disabled", "Enabled"),
        "1, NVIDIA A100-SXM4-40GB, 580.65.06, 40960, 3, [N/A]",
    ]
    smi(programs, rows, topology=PCIE)
    found = look()
    assert "39 GiB of 80 GiB are in use by other programs" in found["gpu.0.used"].what
    assert found["gpu"].level == "warning" and "the smallest" in found["gpu"].what
    assert found["gpu.links"].level == "note" and found["gpu.links"].what.startswith("no NVLink")
    assert found["gpu.0.mig"].level == "warning" and {"gpu.1.used", "gpu.1.mig"}.isdisjoint(found)


def test_an_nvidia_smi_that_fails(programs):
    """The driver's module and its library are of two versions, after an update without a restart."""
    program(programs, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = look(TORCH | {"count": 0, "gpus": []})
    assert found["gpu"].level == "fault"
    assert "ended with exit code 18: Failed to initialize NVML: Driver/library version mismatch" in found["gpu"].what
    assert look()["gpu"].level == "warning", "torch sees them all the same"


@pytest.mark.parametrize(
    "changes, environment, level, says",
    [
        ({"cuda": None}, {}, "fault", "torch is built without CUDA: models compute on the CPU"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "warning", "torch sees 0 of 1 GPU, as CUDA_VISIBLE_DEVICES is ''"),
        (
            {"errors": {"init": "RuntimeError: The NVIDIA driver on your system is too old"}, "cuda": "13.9"}, {}, "fault",
            "is too old; it is built for CUDA 13.9",
        ),
    ],
)  # fmt: skip
def test_torch_that_sees_none_of_them(programs, changes, environment, level, says):
    smi(programs, [H100.format(0, 4)])
    found = look(TORCH | {"count": 0, "gpus": []} | changes, environment)
    assert (found["gpu.seen"].level, says in found["gpu.seen"].what) == (level, True), found["gpu.seen"]


def test_what_torch_tried_on_them(programs):
    smi(programs, [H100.format(i, 4) for i in range(2)])
    old = {"name": "Tesla V100", "capability": [7, 0], "free": 1, "total": 2}
    first = {**old, "name": "A100", "capability": [8, 0]}  # that has bfloat16
    error = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
    found = look(TORCH | {"errors": {"gpu 1": error}, "gpus": [old, first]})
    assert (
        found["gpu.1.computes"].level == "fault" and "gpu 1: torch is not built for it" in found["gpu.1.computes"].what
    )
    assert found["gpu.bfloat16"].what.startswith("Tesla V100: no bfloat16")


def test_no_gpu_is_a_note(programs, monkeypatch):
    assert look()["gpu"].what == "2 GPUs (NVIDIA H100 80GB HBM3); no nvidia-smi here"
    monkeypatch.setattr(gpus.glob, "glob", lambda _: [])
    found = look(TORCH | {"count": 0, "gpus": [], "cuda": None})
    assert found["gpu"].level == "note" and len(found) == 1
    monkeypatch.setattr(gpus.glob, "glob", lambda _: ["/dev/nvidia0"])
    assert look(None)["gpu"].level == "warning"
