# mrl in NVIDIA's PyTorch image, where CUDA, torch, transformer-engine, apex and flash-attn are built for each other.
#
#   docker build -t mrl .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD":/work -w /work mrl mrl sft sft.yaml
#
# This has never been built. Its pip steps were run in a copy of Python 3.12 in which torch, transformer-engine, apex,
# triton and flash-attn were metadata alone, under versions like such an image's; docs/gpu.md says more.
ARG IMAGE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${IMAGE}

# A venv over the image's packages: what mrl needs in other versions lies above them; nothing of the image is removed.
# The image's pip installs the venv's own: venv makes one by ensurepip, which Ubuntu has in a package (python3-venv) that
# the image may lack.
RUN python3 -m venv --system-site-packages --without-pip /opt/mrl/venv \
    && /opt/mrl/venv/bin/python3 -m pip install --ignore-installed pip
ENV PATH=/opt/mrl/venv/bin:$PATH VIRTUAL_ENV=/opt/mrl/venv

# The versions that mrl is tested with, but the image's own of what its CUDA packages were built with. These constraints
# stand in for the image's (/etc/pip/constraint.txt), which hold more packages to their versions than mrl can take; they
# also keep what is installed into the venv later from bringing another torch.
WORKDIR /opt/mrl
COPY constraints-3.12.txt .
RUN python3 -m pip list --format=freeze \
        | grep -iE '^(torch|numpy|triton|transformer[-_]engine|apex|flash[-_]attn)[-_a-z0-9]*==' > image.txt \
    && grep -q '^torch==' image.txt \
    && grep -vE '^(torch|numpy|transformer-engine)==' constraints-3.12.txt | cat image.txt - > constraints.txt
ENV PIP_CONSTRAINT=/opt/mrl/constraints.txt PIP_NO_CACHE_DIR=1

COPY setup.py pyproject.toml README.md LICENSE source/
COPY mrl source/mrl
RUN python3 -m pip install ./source

# All that the image had of these is still what Python sees; then the command line starts.
RUN python3 -m pip list --format=freeze \
        | grep -iE '^(torch|numpy|triton|transformer[-_]engine|apex|flash[-_]attn)[-_a-z0-9]*==' | diff image.txt - \
    && mrl --help
WORKDIR /workspace
