"""A PyTorch script with a custom training loop that resumes on any number of ranks.

mpirun -n 2 python examples/torch_resume.py 10; mpirun -n 3 python examples/torch_resume.py 20
"""

import sys
from pathlib import Path

import torch
from torch import nn

import neondist.torch as ndt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
CHECKPOINT_FILE = Path(sys.argv[2] if len(sys.argv) > 2 else "torch_resume.safetensors")
HEIGHT, WIDTH = 83, 101


def build_network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(6, 12, 3), nn.GroupNorm(3, 12), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def draw_batch(step):
    """Return images (4, 1, HEIGHT, WIDTH) of stripes in noise, and the direction of the stripes (4,)."""
    generator = torch.Generator().manual_seed(step)
    kinds = torch.randint(3, (4,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    stripes = torch.stack([rows, columns, rows + columns])[kinds][:, None] % 8 < 4
    return stripes + 0.3 * torch.randn(4, 1, HEIGHT, WIDTH, generator=generator), kinds


torch.set_default_dtype(torch.float64)  # so that all printed digits agree
torch.manual_seed(1)
model = ndt.distribute(build_network(), (4, 1, HEIGHT, WIDTH))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss()

done = ndt.load_weights(model, CHECKPOINT_FILE, optimizer)["step"] if CHECKPOINT_FILE.exists() else 0
for step in range(done, STEPS):
    images, kinds = draw_batch(step)
    loss = model.loss(criterion, model(model.scatter(images)), model.scatter_target(kinds))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if model.grid.rank == 0:
        print(f"step {step:3d}  loss {loss.item():.9f}", flush=True)
ndt.save_weights(model, CHECKPOINT_FILE, optimizer, step=STEPS)
