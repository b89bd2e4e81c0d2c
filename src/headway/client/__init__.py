"""Access a Headway server from Python: read what `headway.views` offers, and act, over HTTP.

    with Client("https://headway.internal", token=TOKEN) as client:
        for job in client.jobs().jobs:
            print(job.id, job.percent)
        client.pause("low", reason="upgrade of the model")

    async with AsyncClient("https://headway.internal", token=TOKEN) as client:
        sheet = await client.ask(Client.job, "ads")

`Client` has the methods of `headway.views.reading.Reader` and returns the same objects. So the command line works with a
server too: ``headway jobs --database https://headway.internal``, with the token in ``HEADWAY_TOKEN``.
"""

from __future__ import annotations

from headway.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
