"""A training script on tiles: a data set with augmentation, a U-Net, a schedule, metrics, checkpoints.

mpirun -n 4 python examples/training_script.py [FOLDER]

It differs from the single-process script examples/training_script_one_process.py in six lines.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import neondist.torch as ndt

FOLDER, EPOCHS, HEIGHT, WIDTH = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/script"), 3, 61, 47
FOLDER.mkdir(parents=True, exist_ok=True)


class Shapes(data.Dataset):
    """Discs and rings in noise; cells at their edges have the label 255, which is ignored."""

    def __init__(self, samples, first=0, augment=False):
        self.samples, self.first, self.augment = samples, first, augment

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
        labels = torch.zeros(HEIGHT, WIDTH, dtype=torch.long)
        for kind in (1, 2):
            row, column, radius = (torch.rand(3, generator=generator) * torch.tensor([HEIGHT, WIDTH, 9])).tolist()
            distance = ((rows - row) ** 2 + (columns - column) ** 2).sqrt() - 6 - radius
            labels[distance < 0] = kind
            labels[distance.abs() < 1] = 255
        image = (labels[None] % 255 > 0) + 0.4 * torch.randn(1, HEIGHT, WIDTH, generator=generator)
        if self.augment and torch.rand(()) < 0.5:
            image, labels = image.flip(-1), labels.flip(-1)
        return image, labels


class Block(nn.Sequential):
    def __init__(self, inputs, channels):
        convolution = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, channels=8, classes=3):
        super().__init__()
        self.first, self.down = Block(1, channels), Block(channels, 2 * channels)
        self.up, self.last = Block(3 * channels, channels), nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        skip = self.first(x)
        x = self.down(F.max_pool2d(skip, 2, ceil_mode=True))
        x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
        return self.last(self.up(torch.cat([skip, x], 1)))


def criterion(output, labels):
    """Return the sum of weighted cross entropy and Dice loss over labelled cells."""
    entropy = F.cross_entropy(output, labels, weight=torch.tensor([0.5, 1.0, 1.0]), ignore_index=255)
    known = (labels != 255)[:, None]
    truth = F.one_hot(labels.where(labels != 255, 0), 3).movedim(-1, 1) * known
    guess = output.softmax(1) * known
    dice = 2 * (guess * truth).sum((0, 2, 3)) / ((guess + truth).sum((0, 2, 3)) + 1e-6)
    return entropy + 1 - dice.mean()


def iou(output, labels):
    """Return the mean intersection over union of the classes."""
    guess, known = output.argmax(1), labels != 255
    pairs = [(known & (guess == c), known & (labels == c)) for c in range(3)]
    return torch.stack([(a & b).sum() / (a | b).sum().clamp(min=1) for a, b in pairs]).mean()


def report(epoch, loss, score):
    """Print the results of an epoch, log them to TensorBoard, and write a checkpoint."""
    print(f"epoch {epoch}  loss {loss:.7f}  IoU {score:.4f}", flush=True)
    writer.add_scalar("loss", loss, epoch)
    writer.add_scalar("IoU", score, epoch)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(state | {"epoch": epoch}, FOLDER / "checkpoint.pt")


try:
    from tensorboardX import SummaryWriter
except ImportError:
    sys.exit("this example writes TensorBoard files: pip install tensorboardX")

torch.manual_seed(1)
loader = partial(ndt.loader, batch_size=4)
training = loader(Shapes(30, augment=True), shuffle=True)
validation = loader(Shapes(3, first=1000))
model = ndt.distribute(UNet(), (4, 1, HEIGHT, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
writer = SummaryWriter(str(FOLDER))

for epoch in range(EPOCHS):
    model.train()
    for image, labels in training:
        with torch.autocast("cuda", enabled=torch.cuda.is_available()):
            loss = model.loss(criterion, model(image), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    schedule.step()
    model.eval()
    with torch.no_grad():
        scores = [iou(model.gather(model(image)), model.gather(labels)) for image, labels in validation]
    if model.grid.rank == 0:
        report(epoch, loss.item(), torch.stack(scores).mean().item())
