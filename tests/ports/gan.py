"""Two models and three synchronised backwards in a step, with generated pictures that are used twice: as a GAN."""

import os

import torch
import torch.nn.functional as F
from tiny import Discriminator, Generator, Pictures, digest

import pliant

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
job.seed(5)
netG, netD = Generator(), Discriminator()
dataset = Pictures(33)
dataloader = job.loader(dataset, batch_size=3, shuffle=True)
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
job.wrap([netG, netD], [optimizerG, optimizerD])


def criterion(output, label):
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


for _ in job.epochs(3):
    for step in dataloader:
        netG.zero_grad()
        for data, _ in step:
            fake = netG(torch.randn(len(data), 5))
            errG = criterion(netD(fake), 1.0)
            errG.backward()
            step.keep(fake=fake.detach())
        optimizerG.step()
        netD.zero_grad()
        for data, _ in step:
            errD_real = criterion(netD(data), 1.0)
            errD_real.backward()
        for _ in step:
            errD_fake = criterion(netD(step.kept["fake"]), 0.0)
            errD_fake.backward()
        optimizerD.step()
print("bits", digest(netG, netD, optimizerG, optimizerD))
