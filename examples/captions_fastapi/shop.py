"""A FastAPI application whose users ask for captions of their pictures, which takes a while.

The application has its own accounts and Bearer tokens. Headway's dashboard is mounted beside it and knows the same accounts:
users see their own tasks there, viewers see everything, administrators may also change it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from accounts import COOKIE, Account, account_of, log_in
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response, WebSocket, WebSocketException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection

import headway.web
from headway.errors import HeadwayError, InvalidInput, NotFound, Refused, RetryLater, Unavailable
from headway.queue.fastapi import Submit, lifespan, submitter
from headway.queue.task_queue import TaskQueue

queue = TaskQueue.from_settings()
WORDS = ("a", "small", "boat", "at", "sea")


@queue.handler("caption", timeout=60, retries=3, retry_delay=0.5)
def caption(task: Any, payload: dict[str, Any]) -> dict[str, str]:
    """Look at a picture thoroughly. Each task runs in a process of its own."""
    for step, word in enumerate(WORDS, start=1):
        if task.cancelled:
            break
        time.sleep(payload["seconds"] / len(WORDS))
        task.progress(100 * step / len(WORDS), f"saw {word}")
    return {"caption": f"{payload['picture']}: {' '.join(WORDS)}"}


class Service:
    """Stands for the client of a paid service that refuses the first request after it was opened, as a 429 would."""

    def __init__(self) -> None:
        self.requests = 0

    async def describe(self, picture: str, seconds: float) -> str:
        self.requests += 1
        if self.requests == 1:
            raise RetryLater(0.2, reason="the service answered 429")
        await asyncio.sleep(seconds)
        return f"{picture}: a boat"


async def service() -> AsyncIterator[Service]:
    """Open the client once per worker."""
    yield Service()


@queue.handler("preview", timeout=1, retries=0, setup=service)
async def preview(_task: Any, payload: dict[str, Any], client: Service) -> dict[str, str]:
    """Ask the service. Many previews wait at once in one worker; one that takes longer than its timeout has failed."""
    return {"caption": await client.describe(payload["picture"], payload["seconds"])}


# The documents of the API are for those who are logged in: see `openapi` below.
app = FastAPI(title="Captions", lifespan=lifespan(queue), openapi_url=None)


def logged_in(request: Request) -> Account:
    account = account_of(request)
    if account is None:
        raise HTTPException(401, "Log in first.", headers={"WWW-Authenticate": "Bearer"})
    return account


Me = Annotated[Account, Depends(logged_in)]


class Login(BaseModel):
    name: str
    password: str


class Order(BaseModel):
    picture: str = Field(min_length=1, max_length=200)
    kind: str = Field("caption", pattern="^(caption|preview)$")
    seconds: float = Field(0.5, ge=0, le=30)


@app.post("/login")
async def login(given: Login, request: Request, response: Response) -> dict[str, str]:
    token = log_in(given.name, given.password)
    if token is None:
        raise HTTPException(401, "Wrong name or password.")
    # For pages that a browser opens, such as the dashboard's. The routes below take the Bearer token only.
    root = request.scope["root_path"] or "/"
    response.set_cookie(COOKIE, token, path=root, httponly=True, samesite="strict", max_age=3600)
    return {"token": token}


@app.post("/captions", status_code=202)
async def submit(
    order: Order,
    me: Me,
    send: Annotated[Submit, Depends(submitter(queue))],
    idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> dict[str, Any]:
    # The same key of the same account is the same task, so that a client may repeat a request whose answer was lost.
    id = hashlib.sha256(f"{me.id}\n{idempotency_key}".encode()).hexdigest()[:32] if idempotency_key else None
    role = "admin" if me.role == "admin" else "user"
    task = await send(order.kind, order.model_dump(exclude={"kind"}), user_id=me.id, role=role, id=id)
    return task.as_json()


@app.get("/captions")
async def listing(me: Me) -> list[dict[str, Any]]:
    return [task.as_json() for task in await asyncio.to_thread(queue.list, user_id=me.id)]


@app.get("/captions/{id}")
async def look(id: str, me: Me) -> dict[str, Any]:
    return (await asyncio.to_thread(queue.get, id, user_id=me.id)).as_json()


@app.get("/captions/{id}/result")
async def result(id: str, me: Me) -> dict[str, str]:
    found: dict[str, str] = await asyncio.to_thread(queue.result, id, user_id=me.id)
    return found


@app.delete("/captions/{id}")
async def cancel(id: str, me: Me) -> dict[str, Any]:
    return (await asyncio.to_thread(queue.cancel, id, user_id=me.id)).as_json()


@app.websocket("/captions/{id}/live")
async def live(socket: WebSocket, id: str) -> None:
    """Send the task whenever it has changed, until it has ended."""
    me = account_of(socket)
    if me is None:
        raise WebSocketException(1008)
    try:
        task = await asyncio.to_thread(queue.get, id, user_id=me.id)
    except NotFound:
        raise WebSocketException(1008) from None
    await socket.accept()
    gone = asyncio.create_task(socket.receive())  # clients send nothing: the first message is their end
    shown = None
    try:
        while not gone.done():
            if task != shown:
                await socket.send_json(task.as_json())
                shown = task
            if task.is_final:
                await socket.close()
                break
            await asyncio.wait([gone], timeout=0.2)
            try:
                task = await asyncio.to_thread(queue.get, id, user_id=me.id)
            except Unavailable:  # the database restarts: the next round asks again
                continue
    finally:
        gone.cancel()


@app.get("/openapi.json", include_in_schema=False)
async def openapi(_me: Me) -> dict[str, Any]:
    return app.openapi()


@app.get("/healthz", include_in_schema=False)
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.exception_handler(HeadwayError)
async def explain(_request: Request, error: HeadwayError) -> JSONResponse:
    kinds = {NotFound: 404, InvalidInput: 400, Refused: 409}
    status = next((status for kind, status in kinds.items() if isinstance(error, kind)), 503)
    return JSONResponse({"error": str(error), "hint": error.hint}, status)


def users(connection: HTTPConnection) -> headway.web.User | None:
    """Tell the dashboard who sent a request."""
    account = account_of(connection, cookie=True)
    return None if account is None else headway.web.User(account.id, account.role)  # type: ignore[arg-type]


app.mount("/headway", headway.web.app(users=users))
