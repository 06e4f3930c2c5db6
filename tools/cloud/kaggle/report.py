"""Run `make gpu` on the two T4s that Kaggle lends: kaggle kernels push -p tools/cloud/kaggle

Before that, write your Kaggle name into kernel-metadata.json, and the repository's address into REPOSITORY below. Kaggle asks for a
verified phone number before a script may use a GPU and the internet. Two T4s cost nothing, for about 30 hours a week (as read in
November 2026: check it). The metadata ask for them by name, since Kaggle used to start a P100, for which torch's usual wheels have
no kernels. When the script has ended, `kaggle kernels output YOUR_KAGGLE_NAME/gpu-report` fetches the report.
"""
import os
import subprocess

REPOSITORY = os.environ.get("REPOSITORY", "https://github.com/OWNER/NAME")
# torch's usual wheel is for CUDA 13 and needs a newer driver than Kaggle may have: uv picks the wheel that fits the driver
TORCH = os.environ.get("TORCH", "pip install -q uv && uv pip install -q torch==2.13.0 --torch-backend=auto")
COMMANDS = f"""
set -e
here=$PWD
cd "$(mktemp -d)"                            # files in this folder are not kept
git clone --depth 1 {REPOSITORY} steps
python -m venv venv && . venv/bin/activate
{TORCH}
pip install -q -r steps/requirements.txt
PYTHON=python make -C steps gpu || true
cp steps/out/gpu/report.* "$here"
"""
subprocess.run(["bash", "-c", COMMANDS], check=True)
