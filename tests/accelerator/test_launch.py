"""Starting ranks on the devices of a machine, memory that runs out, layers that cannot be repeated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.accelerator.launch import call, fedmpi, models, need_device

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

RUN = "--data glyphs --clients 6 --cohort 4 --local.steps 2 --threads 1 --log_to none --eval.samples 100".split()
TRAIN = ["train", *RUN, "--rounds", "2"]
PLAIN = [sys.executable, "-m", "fedmpi"]
OWN_MODEL = ["--model", "tests.accelerator.cases:hungry"]


@pytest.fixture(autouse=True)
def device_present() -> None:
    need_device()


def test_a_rank_starts_for_each_device_or_several(tmp_path: Path) -> None:
    for out, ranks, header in (
        ("each", ["--ranks", "auto"], "3 ranks (torch)"),
        ("two", ["--ranks_per_gpu", "2", "--max_restarts", "0"], "6 ranks (torch)"),
    ):
        done = fedmpi(tmp_path, *TRAIN, *ranks, "--out", out, PRETEND_DEVICES="3")
        assert done.returncode == 0, done.stderr
        assert header in " ".join(done.stdout.split())
    assert len(set(models(tmp_path).values())) == 1


def test_ranks_for_devices_need_devices(tmp_path: Path) -> None:
    done = call([*PLAIN, *TRAIN, "--ranks", "auto", "--out", "a"], tmp_path)
    assert done.returncode == 2 and "none is visible; give a number of ranks" in done.stderr


def test_numbers_of_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    done = fedmpi(tmp_path, *TRAIN, "--ranks", "3", "--ranks_per_gpu", "2", "--out", "a")
    assert done.returncode == 2 and "give one of them" in done.stderr


def test_a_dead_rank_is_named_and_restarted(tmp_path: Path) -> None:
    """Its sums are on its device, so that it is the small messages over gloo that find it dead."""
    rule = (
        "import os, signal\n"
        "from fedmpi.local import sgd\n"
        "from fedmpi.local.job import LocalRule\n"
        "def mortal(knobs):\n"
        "    plain = sgd(0.01)\n"
        "    def run(job):\n"
        "        if job.round == 2 and os.environ['RANK'] == '1' and os.environ['FEDMPI_RESTART_COUNT'] == '0':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return plain(job)\n"
        "    return LocalRule(run)\n"
    )
    (tmp_path / "mine.py").write_text(rule)
    given = [*TRAIN, "--local.rule", "mine:mortal", "--checkpoint.every", "1", "--ranks", "2", "--sums", "device"]
    done = fedmpi(tmp_path, *given, "--device", "pretend", "--out", "killed", PRETEND_DEVICES="2")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 was killed by SIGKILL" in done.stderr
    alone = [*TRAIN, "--local.rule", "mine:mortal", "--device", "pretend", "--out", "alone"]
    done = fedmpi(tmp_path, *alone, RANK="0", WORLD_SIZE="1", FEDMPI_RESTART_COUNT="0")
    assert done.returncode == 0, done.stderr
    assert models(tmp_path)["killed"] == models(tmp_path)["alone"]


def test_a_client_that_does_not_fit_ends_the_run_with_what_to_lower(tmp_path: Path) -> None:
    done = fedmpi(tmp_path, *TRAIN, *OWN_MODEL, "--out", "a")
    assert done.returncode == 1, done.stdout
    assert "pretend:0 is out of memory, twice" in done.stderr and "lower --local.batch" in done.stderr
    assert done.stderr.count("Traceback") == 0


def test_a_client_that_does_not_fit_may_be_dropped(tmp_path: Path) -> None:
    done = fedmpi(tmp_path, *TRAIN, *OWN_MODEL, "--step.out_of_memory", "drop", "--out", "a", FITS_AFTER="2")
    assert done.returncode == 0, done.stderr
    assert "left out: its training raised OutOfMemoryError" in done.stdout + done.stderr


def test_a_client_that_fits_once_the_cache_is_free_is_trained(tmp_path: Path) -> None:
    done = fedmpi(tmp_path, *TRAIN, *OWN_MODEL, "--out", "a", FITS_AFTER="1")
    assert done.returncode == 0 and "left out" not in done.stdout + done.stderr, done.stderr
    whole = fedmpi(tmp_path, *TRAIN, *OWN_MODEL, "--out", "b", FITS_AFTER="0")
    assert whole.returncode == 0, whole.stderr
    assert models(tmp_path)["a"] == models(tmp_path)["b"]


def test_a_layer_that_cannot_be_repeated_is_refused_before_training(tmp_path: Path) -> None:
    given = [*TRAIN, "--model", "tests.accelerator.cases:adaptive", "--out", "a"]
    done = fedmpi(tmp_path, *given)
    assert done.returncode == 2 and "add --deterministic false" in done.stderr and not (tmp_path / "a").exists()
    done = fedmpi(tmp_path, *given, "--deterministic", "false")
    assert done.returncode == 0, done.stderr


def test_tf32_is_refused_where_there_is_none(tmp_path: Path) -> None:
    done = fedmpi(tmp_path, *TRAIN, "--step.precision", "tf32", "--device", "pretend", "--out", "a")
    assert done.returncode == 2 and "--step.precision is tf32" in done.stderr
