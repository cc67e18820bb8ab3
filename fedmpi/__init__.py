"""fedmpi: federated learning on torch.distributed, MPI and Slurm, with gradient masked averaging as one collective."""

__version__ = "0.1.0"
