"""Training on the pretend device: the bits of the CPU's plain path, however many ranks share a device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.accelerator.cases import CASES
from tests.accelerator.launch import TORCHRUN, call, fedmpi, models, need_device, once, train_cases

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

NAMES = list(CASES)
ALIKE = [
    name for name in NAMES if name not in ("together", "mapped")
]  # there the rank decides who is stacked with whom
SOME = ["scaffold", "fedmeta-uga", "dropout", "batchnorm", "sand"]
RUN = "--data glyphs --clients 6 --cohort 4 --local.steps 2 --threads 1 --log_to none --eval.samples 50".split()


@pytest.fixture(autouse=True)
def device_present() -> None:
    need_device()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models of all cases on the plain path of a CPU."""
    need_device()

    def train(folder: Path) -> str:
        return json.dumps(train_cases(folder, NAMES, [sys.executable], device="cpu"))

    found: dict[str, str] = json.loads(once(tmp_path_factory, "on-cpu", train))
    return found


def of(names: list[str], models: dict[str, str]) -> dict[str, str]:
    """Return the models of these cases."""
    return {name: models[name] for name in names}


@pytest.mark.parametrize("names", [NAMES[:14], NAMES[14:]], ids=["algorithms", "others"])
def test_one_rank_has_the_bits_of_a_cpu(names: list[str], on_cpu: dict[str, str], tmp_path: Path) -> None:
    assert train_cases(tmp_path / "one", names, [sys.executable]) == of(names, on_cpu)


@pytest.mark.parametrize("names", [ALIKE[:14], ALIKE[14:]], ids=["algorithms", "others"])
def test_two_ranks_that_share_a_device_have_the_bits_of_a_cpu(
    names: list[str], on_cpu: dict[str, str], tmp_path: Path
) -> None:
    assert train_cases(tmp_path / "two", names, [*TORCHRUN, "2"]) == of(names, on_cpu)


def test_four_ranks_share_two_devices(on_cpu: dict[str, str], tmp_path: Path) -> None:
    found = train_cases(tmp_path / "four", SOME[:2], [*TORCHRUN, "4"], PRETEND_DEVICES="2")
    assert found == of(SOME[:2], on_cpu)


def test_ranks_of_mpi_seed_their_own_device(mpiexec: list[str], on_cpu: dict[str, str], tmp_path: Path) -> None:
    launcher = [*mpiexec, "-n", "2", sys.executable, "-m", "mpi4py"]
    found = train_cases(tmp_path / "mpi", SOME, launcher, "mpi", PRETEND_DEVICES="2")
    assert found == of(SOME, on_cpu)


def test_sums_on_the_devices_have_the_same_bits(on_cpu: dict[str, str], tmp_path: Path) -> None:
    """NCCL's own collectives add up the rows and gather the model; no row is sent by itself."""
    found = train_cases(tmp_path / "nccl", SOME, [*TORCHRUN, "2"], "auto", "device", PRETEND_DEVICES="2")
    assert found == of(SOME, on_cpu)
    traffic = json.loads((tmp_path / "nccl" / "traffic.json").read_text())
    assert traffic["reduce_scatter"] > len(SOME) and traffic["all_gather"] > len(SOME) and "messages" not in traffic


def test_recorded_steps_have_the_same_bits(on_cpu: dict[str, str], tmp_path: Path) -> None:
    names = ["fedavg", "dropout", "batchnorm"]
    found = train_cases(tmp_path / "graphs", names, [sys.executable], options=["--step.graphs=true"])
    assert found == of(names, on_cpu)


RESUMED = {
    "scaffold": ("--algorithm scaffold", [(1, "host"), (2, "host"), (2, "device"), (1, "device")]),
    "bf16": ("--sum float32 --wire bf16", [(2, "host"), (2, "device"), (3, "device")]),
}
SLICES = {(1, "host"): 61_706, (2, "host"): 30_853, (1, "device"): 61_824, (2, "device"): 30_976, (3, "device"): 20_608}


@pytest.mark.parametrize("name", RESUMED)
def test_resumes_on_other_ranks_and_with_sums_elsewhere(name: str, tmp_path: Path) -> None:
    """A round each. Slices of LeNet begin at multiples of 128 elements if the sums are on the device, and did not in
    earlier versions: checkpoints of either kind can be resumed."""
    options, legs = RESUMED[name]
    given = [*RUN, *options.split(), "--device", "pretend", "--checkpoint.every", "1", "--resume", "force"]
    for number, (ranks, sums) in enumerate(legs, 1):
        more = ["--ranks", str(ranks), "--sums", sums, "--rounds", str(number), "--out", "a"]
        done = fedmpi(tmp_path, "train", *given, *more, PRETEND_DEVICES="3")
        assert done.returncode == 0, done.stderr
        assert number == 1 or f"resuming after round {number - 1}" in done.stdout + done.stderr
        saved = sorted((tmp_path / "a" / "checkpoints" / f"round-{number}").glob("*.safetensors"))
        assert [load_file(path)["model"].numel() for path in saved] == [SLICES[ranks, sums]] * ranks
    if name != "bf16":  # rounding errors depend on the ranks
        whole = fedmpi(tmp_path, "train", *given, "--rounds", str(len(legs)), "--out", "b")
        assert whole.returncode == 0, whole.stderr
        assert models(tmp_path)["a"] == models(tmp_path)["b"]


def test_ranks_that_share_a_device_cannot_sum_on_it(tmp_path: Path) -> None:
    given = [*RUN, "--rounds", "1", "--device", "pretend", "--sums", "device", "--out", "a"]
    done = fedmpi(tmp_path, "train", *given, ranks=2)
    assert "ranks 0, 1 share pretend:0; use --sums host" in done.stderr and "Traceback (most" not in done.stdout
    assert "exitcode  : 2" in done.stderr and not (tmp_path / "a").exists()


def test_ranks_with_different_devices_cannot_sum_on_them(tmp_path: Path) -> None:
    script = (
        "import os, runpy, sys; "
        "sys.argv[0] = 'fedmpi'; "
        "sys.argv[sys.argv.index('DEVICE')] = 'cpu' if os.environ['RANK'] == '1' else 'pretend'; "
        "runpy.run_module('tests.accelerator.run', run_name='__main__')"
    )
    (tmp_path / "mixed.py").write_text(script)
    given = [*RUN, "--rounds", "1", "--device", "DEVICE", "--sums", "device", "--timeout", "30", "--out", "a"]
    done = call([*TORCHRUN, "2", "mixed.py", "train", *given], tmp_path)
    assert "the ranks have devices of different types (rank 0: pretend:0; rank 1: cpu)" in done.stderr


def test_ranks_with_different_devices_sum_on_the_host(tmp_path: Path) -> None:
    """A CPU and a device train one federation; they differ in the last bits on real machines, hence a warning."""
    given = [*RUN, "--rounds", "2", "--threads", "1"]
    (tmp_path / "mixed.py").write_text(
        "import os, runpy, sys\n"
        "sys.argv[0] = 'fedmpi'\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['PRETEND_DEVICES'] = '1'\n"
        "    runpy.run_module('tests.accelerator.run', run_name='__main__')\n"
        "else:\n"
        "    from tests.accelerator.cases import plain\n"
        "    plain()\n"
        "    from fedmpi.commands import main\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    done = call([*TORCHRUN, "2", "mixed.py", "train", *given, "--device", "auto", "--out", "mixed"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ranks train on different devices" in done.stdout + done.stderr
    alone = fedmpi(tmp_path, "train", *given, "--device", "pretend", "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    assert models(tmp_path)["mixed"] == models(tmp_path)["alone"]


def test_mpi_cannot_sum_on_devices(tmp_path: Path) -> None:
    given = [*RUN, "--device", "pretend", "--sums", "device", "--comm", "mpi", "--out", "a"]
    done = fedmpi(tmp_path, "train", *given)
    assert done.returncode == 2 and "use --sums host or --comm torch" in done.stderr


def test_the_folder_records_the_device_and_the_log_shows_who_shares_it(tmp_path: Path) -> None:
    given = [*RUN, "--rounds", "1", "--device", "pretend", "--ranks", "2", "--out", "a"]
    done = fedmpi(tmp_path, "train", *given)
    assert done.returncode == 0, done.stderr
    assert "2 ranks share 1 pretend device" in done.stdout + done.stderr
    about = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert about["device"] == "pretend:0" and about["accelerator"]["uuid"] and about["accelerator"]["memory"] > 0


def test_a_process_alone_is_told_of_idle_devices(tmp_path: Path) -> None:
    done = fedmpi(tmp_path, "train", *RUN, "--rounds", "1", "--out", "a", PRETEND_DEVICES="8")
    assert done.returncode == 0, done.stderr
    assert "7 more pretend devices idle: --ranks auto" in done.stdout + done.stderr
