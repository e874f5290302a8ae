"""Two models, clamped weights of the critic, a generator step only now and then: as a WGAN."""

import os

import numpy as np
import torch
from tiny import Discriminator, Generator, Pictures, digest

import pliant

n_critic, clip_value = 2, 0.05

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
job.seed(5)
generator = Generator()
discriminator = Discriminator()
dataset = Pictures(24)
dataloader = job.loader(dataset, batch_size=2, shuffle=True)
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=0.01)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=0.01)
job.wrap([generator, discriminator], [optimizer_G, optimizer_D])


def noise(count):
    return torch.from_numpy(np.random.normal(0, 1, (count, 5))).float()


for epoch in job.epochs(3):
    for i, step in enumerate(dataloader):
        optimizer_D.zero_grad()
        for real_imgs, _ in step:
            z = noise(len(real_imgs))
            fake_imgs = generator(z).detach()
            loss_D = -discriminator(real_imgs).mean() + discriminator(fake_imgs).mean()
            loss_D.backward()
            step.log(D=loss_D)
            step.keep(z=z)
        optimizer_D.step()
        for p in discriminator.parameters():
            p.data.clamp_(-clip_value, clip_value)
        if i % n_critic == 0:
            optimizer_G.zero_grad()
            for _ in step:
                gen_imgs = generator(step.kept["z"])
                loss_G = -discriminator(gen_imgs).mean()
                loss_G.backward()
                step.log(G=loss_G)
            optimizer_G.step()
            print(f"[Epoch {epoch}] [Batch {i}/{len(dataloader)}] [D loss: {step['D']:f}] [G loss: {step['G']:f}]")
print("bits", digest(generator, discriminator, optimizer_G, optimizer_D))
