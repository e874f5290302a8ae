"""Two models, clamped weights of the critic, a generator step only now and then: as a WGAN."""

import numpy as np
import torch
import torch.distributed as dist
from tiny import Discriminator, Generator, Pictures, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

n_critic, clip_value = 2, 0.05

dist.init_process_group("gloo")
torch.manual_seed(5)
np.random.seed(5 + dist.get_rank())
generator = DistributedDataParallel(Generator())
discriminator = DistributedDataParallel(Discriminator())
dataset = Pictures(24)
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=2, sampler=sampler)
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=0.01)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=0.01)


def noise(count):
    return torch.from_numpy(np.random.normal(0, 1, (count, 5))).float()


for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (real_imgs, _) in enumerate(dataloader):
        optimizer_D.zero_grad()
        z = noise(len(real_imgs))
        fake_imgs = generator(z).detach()
        loss_D = -discriminator(real_imgs).mean() + discriminator(fake_imgs).mean()
        loss_D.backward()
        optimizer_D.step()
        for p in discriminator.parameters():
            p.data.clamp_(-clip_value, clip_value)
        if i % n_critic == 0:
            optimizer_G.zero_grad()
            gen_imgs = generator(z)
            loss_G = -discriminator(gen_imgs).mean()
            loss_G.backward()
            optimizer_G.step()
            print(f"[Epoch {epoch}] [Batch {i}/{len(dataloader)}] [D loss: {loss_D:f}] [G loss: {loss_G:f}]")
print("bits", digest(generator, discriminator, optimizer_G, optimizer_D))
dist.destroy_process_group()
