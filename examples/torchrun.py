"""Several processes train one model: `torchrun --nproc-per-node 2 examples/torchrun.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import dpspan

EPOCHS, DELTA = 10, 1e-5

torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
first = torch.distributed.get_rank() == 0

x, y = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
# The same records in the same order everywhere: the generator has a seed.
train, test = random_split(digits, [1500, 297], torch.Generator().manual_seed(0))

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
engine = dpspan.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    data_loader=DataLoader(train, batch_size=150),  # of all processes together
    criterion=criterion,
    target_epsilon=4.0,
    target_delta=DELTA,
    epochs=EPOCHS,
)
for _ in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()

if first:
    images, labels = (torch.stack(column) for column in zip(*test, strict=True))
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"ε = {engine.get_epsilon():.2f} at δ = {DELTA}, test accuracy {accuracy:.1%}")
torch.distributed.destroy_process_group()
