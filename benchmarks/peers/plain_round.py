"""The baseline of benchmarks/round.py: federated averaging as one writes it by hand, in gloo processes.

NCHW images, torch.optim.SGD with momentum, copies of the state dict, one all-reduce of the flattened sum of deltas.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import clients, gate, job, model, samples

from fedmpi.device import device_of, set_up


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    of = job()
    device = device_of(rank, of.device)
    set_up(device, deterministic=True)
    x, y = (tensor.to(device) for tensor in samples(of))
    owned = clients(of, len(y))
    net = model(of).to(device)
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for number, _ in enumerate(gate()):
        draw = torch.Generator().manual_seed(number)
        cohort = torch.randperm(of.clients, generator=draw)[: of.cohort].tolist()
        total = torch.zeros(sum(tensor.numel() for tensor in start.values()), device=device)
        for cid in cohort[rank::size]:
            net.load_state_dict(start)
            optimizer = torch.optim.SGD(net.parameters(), lr=of.lr, momentum=of.momentum)
            order = owned[cid][torch.randperm(len(owned[cid]))]
            for batch in order.to(device).split(of.batch)[: of.steps]:
                optimizer.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
            trained = net.state_dict()
            delta = torch.cat([(trained[name] - start[name]).flatten() for name in start])
            total += delta * (len(order) / sum(len(owned[c]) for c in cohort))
        total = total.cpu()  # where gloo sums; a GPU has done its work then
        dist.all_reduce(total)
        pieces = total.split([tensor.numel() for tensor in start.values()])
        for tensor, piece in zip(start.values(), pieces, strict=True):
            tensor += piece.view_as(tensor).to(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
