"""The same queue in a FastAPI application: the dependency submits in a thread, the lifespan closes the queue."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header

from headway.queue.fastapi import Submit, lifespan, submitter
from headway.queue.taskqueue import TaskQueue

queue = TaskQueue("sqlite:///captions.db")


@queue.handler("caption", isolation="none")
def caption(task: Any, payload: dict[str, Any]) -> dict[str, str]:
    task.progress(50, "looking")
    return {"caption": f"{payload['picture']}: a small boat at sea"}


app = FastAPI(lifespan=lifespan(queue))


@app.post("/captions", status_code=202)
async def submit(
    picture: str, x_user: Annotated[str, Header()], send: Annotated[Submit, Depends(submitter(queue))]
) -> dict[str, Any]:
    task = await send("caption", {"picture": picture}, user_id=x_user)
    return task.as_json()
