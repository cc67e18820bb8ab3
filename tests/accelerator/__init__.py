"""A pretend accelerator, which lets the tests run the code for GPUs on machines without one.

pretend.py    the device: registers torch.device("pretend"), and is its module
kernels.py    its kernels: run on the CPU, once what CUDA would refuse is refused
recurrent.py  recurrent layers, as cuDNN has them
refusals.py   what CUDA refuses while algorithms must be deterministic
memory.py     its memory: what is allocated, by whom, and which memory of the host is pinned
streams.py    its streams: in which order work was issued, and who waited for whom
counting.py   counters of kernels and of what made the host wait
nccl.py       a strict stand-in for NCCL between processes
run.py        fedmpi's command line with the device present
examined.py   `fedmpi doctor --gpu` at small sizes, and with wrong kernels
"""
