"""The job of benchmarks/round.py for pfl-research (pip install pfl==0.6.0), in its own environment: simulated federated
averaging in several processes, each user's samples as tensors in memory, no evaluation but in the first iteration."""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.nn.functional as F
from common import clients, gate, job, model, samples
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Gate(TrainingProcessCallback):
    """Waits for the coordinator before each iteration; stops where it asks for no more."""

    def __init__(self) -> None:
        self.blocks = gate()

    def on_train_begin(self, *, model: object) -> Metrics:
        next(self.blocks, None)
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        return next(self.blocks, None) is None, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    ranks = get_default_framework_module().distributed.world_size  # settled when pfl is imported
    if str(ranks) != os.environ["WORLD_SIZE"]:
        raise SystemExit(f"pfl sees {ranks} processes, not {os.environ['WORLD_SIZE']}: each would train all clients")
    of = job()
    x, y = samples(of)
    users = [Dataset([x[owned], y[owned]]) for owned in clients(of, len(y))]
    net = model(of)
    net.loss = lambda inputs, labels, **_: F.cross_entropy(net(inputs), labels)
    net.metrics = lambda inputs, labels, **_: {"loss": Weighted(float(net.loss(inputs, labels)), len(labels))}
    wrapped = PyTorchModel(
        net, partial(torch.optim.SGD, momentum=of.momentum), torch.optim.SGD(net.parameters(), lr=1.0)
    )
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(of.clients))))
    FederatedAveraging().run(
        NNAlgorithmParams(10**9, 10**9, of.cohort, None),
        SimulatedBackend(data, data),
        wrapped,
        NNTrainHyperParams(
            local_num_epochs=None if of.steps else 1,
            local_num_steps=of.steps,
            local_learning_rate=of.lr,
            local_batch_size=of.batch,
        ),
        NNEvalHyperParams(local_batch_size=1024),
        [Gate()],
    )


if __name__ == "__main__":
    main()
