"""Two models and three synchronised backwards in a step, with generated pictures that are used twice: as a GAN."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Discriminator, Generator, Pictures, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(5 + dist.get_rank())
netG, netD = DistributedDataParallel(Generator()), DistributedDataParallel(Discriminator())
dataset = Pictures(33)
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=3, sampler=sampler)
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))


def criterion(output, label):
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


for epoch in range(3):
    sampler.set_epoch(epoch)
    for data, _ in dataloader:
        netG.zero_grad()
        fake = netG(torch.randn(len(data), 5))
        errG = criterion(netD(fake), 1.0)
        errG.backward()
        optimizerG.step()
        netD.zero_grad()
        errD_real = criterion(netD(data), 1.0)
        errD_real.backward()
        errD_fake = criterion(netD(fake.detach()), 0.0)
        errD_fake.backward()
        optimizerD.step()
print("bits", digest(netG, netD, optimizerG, optimizerD))
dist.destroy_process_group()
