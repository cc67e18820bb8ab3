"""What fedmpi is called, what it needs and what it installs; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version as written in the package, read without importing it (torch may not be there yet)."""
    found = re.search(r'^__version__ = "([^"]+)"', (ROOT / "fedmpi" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError('fedmpi/__init__.py has no line __version__ = "..."')
    return found.group(1)


def readme() -> str:
    """The README, or nothing where only the package was copied."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


SINKS = {"wandb": ["wandb>=0.31"], "mlflow": ["mlflow-skinny>=3.17", "sqlalchemy>=2", "alembic"]}
RUN = ["mpich"]  # launch/mpirun.sh, where the machine has no MPI of its own
LLM = ["transformers>=5", "peft>=0.19", "datasets>=4"]  # --model hf:, --lora, --data hf:
NOTEBOOK = ["pandas"]  # what a notebook shows more of; fedmpi.train works without
TEST = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", *RUN, *SINKS["wandb"], *SINKS["mlflow"]]
TEST += [*NOTEBOOK, *LLM, "ipython"]
DEV = [*TEST, "ruff", "mypy", "types-PyYAML"]

setup(
    name="fedmpi",
    version=version(),
    description="Federated learning on torch.distributed, MPI and Slurm; gradient masked averaging as one collective",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The fedmpi authors",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["fedmpi", "fedmpi.*"]),
    package_data={"fedmpi": ["py.typed", "experiments/recipes/*.yaml", "experiments/report/page.html"]},
    install_requires=[
        "torch>=2.6",
        "torchvision",
        "mpi4py>=4",
        "numpy",
        "submitit",
        "jsonargparse[signatures]>=4.30",
        "safetensors>=0.8",
        "tensorboard",
        "tqdm",
        "matplotlib",
        "Jinja2>=3",
        "Pillow",
        "PyYAML",
    ],
    extras_require={**SINKS, "llm": LLM, "notebook": NOTEBOOK, "run": RUN, "test": TEST, "dev": DEV},
    entry_points={"console_scripts": ["fedmpi = fedmpi.commands:main"]},
)
