"""The same queue in a FastAPI application: the dependency submits in a thread, the lifespan closes the queue."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse

from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.queue.fastapi import Submit, lifespan, submitter
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import UserBusy

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


@app.get("/captions/{id}")
async def look(id: str, x_user: Annotated[str, Header()]) -> dict[str, Any]:
    task = await asyncio.to_thread(queue.get, id, user_id=x_user)
    return task.as_json()


@app.get("/captions/{id}/result")
async def result(id: str, x_user: Annotated[str, Header()]) -> dict[str, str]:
    found: dict[str, str] = await asyncio.to_thread(queue.result, id, user_id=x_user)
    return found


@app.exception_handler(HeadwayError)
async def explain(_request: Request, error: HeadwayError) -> JSONResponse:
    status = {UserBusy: 409, NotFound: 404, InvalidInput: 400}.get(type(error), 503)
    return JSONResponse({"error": str(error), "hint": error.hint}, status)
