"""A server of headway from Python: what `headway.views` reads, asked over HTTP.

    with Client("https://headway.internal", token=TOKEN) as client:
        for job in client.jobs().jobs:
            print(job.id, job.percent)
        client.pause("low", reason="upgrade of the model")

    async with AsyncClient("https://headway.internal", token=TOKEN) as client:
        sheet = await client.ask(Client.job, "ads")

It has the methods of `headway.views.reading.Reader`, with the same answers, so that the command line works against a server:
``headway jobs --database https://headway.internal``, with the token in ``HEADWAY_TOKEN``.
"""

from __future__ import annotations

from headway.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
