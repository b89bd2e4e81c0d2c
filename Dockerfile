# Headway and what its long-lived processes need: workers, relay, server, watcher. See docs/howto/deploy.md.
#
# It runs as nobody in particular, writes nowhere but /tmp, and holds no secret: every address comes from the environment.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /build
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY src ./src
RUN python -m venv /opt/headway \
    && /opt/headway/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
        -c constraints.txt '.[postgres,redis,web,crypto]'

FROM python:${PYTHON}-slim-bookworm
# Bytecode was written above, as root; later nobody may write there.
ENV PATH=/opt/headway/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
COPY --from=build /opt/headway /opt/headway
WORKDIR /app
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8700
STOPSIGNAL SIGTERM
ENTRYPOINT ["headway"]
CMD ["--help"]
