"""ResNet-50 from scratch: DataLoader workers, pinned memory, channels_last, SGD, cosine LR."""

import argparse
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="ImageNet-like training")
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--layers", default="3,4,6,3", help="blocks in each stage")
parser.add_argument("--width", default=64, type=int)
parser.add_argument("--image-size", default=224, type=int)
parser.add_argument("--num-images", default=50_000, type=int)
parser.add_argument("-p", "--print-freq", default=10, type=int)


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != planes * 4:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes * 4, 1, stride, bias=False), nn.BatchNorm2d(planes * 4)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + identity)


class ResNet(nn.Module):
    def __init__(self, layers, width=64, num_classes=1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages, inplanes = [], width
        for i, blocks in enumerate(layers):
            planes = width * 2**i
            for j in range(blocks):
                stages.append(Bottleneck(inplanes, planes, 2 if i and not j else 1))
                inplanes = planes * 4
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inplanes, num_classes)

    def forward(self, x):
        return self.fc(self.pool(self.stages(self.stem(x))).flatten(1))


class FakeImages(Dataset):
    def __init__(self, n, size):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        label = index % 10
        return torch.randn(3, self.size, self.size, generator=g) + label / 5, label


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count, self.val = name, 0.0, 0, 0.0

    def update(self, val, n=1):
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n

    def __str__(self):
        return f"{self.name} {self.val:.4f} ({self.sum / max(self.count, 1):.4f})"


def accuracy(output, target, topk=(1, 5)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0) * 100 / len(target) for k in topk]


def train(loader, model, criterion, optimizer, epoch, device, args):
    meters = [AverageMeter(name) for name in ("Time", "Loss", "Acc@1", "Acc@5")]
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values = (time.time() - end, loss.item(), acc1.item(), acc5.item())
        for meter, value in zip(meters, values, strict=True):
            meter.update(value, images.size(0))
        end = time.time()
        if i % args.print_freq == 0:
            print(f"Epoch [{epoch}][{i}/{len(loader)}]", *meters, sep="\t")


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ResNet([int(n) for n in args.layers.split(",")], args.width)
    model = model.to(device, memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    loader = DataLoader(
        FakeImages(args.num_images, args.image_size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=args.workers > 0,
        drop_last=True,
    )
    for epoch in range(args.epochs):
        train(loader, model, criterion, optimizer, epoch, device, args)
        scheduler.step()


if __name__ == "__main__":
    main()
