FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY gateway gateway
COPY health health
RUN python -m venv /opt/gateway && /opt/gateway/bin/pip install --no-cache-dir .

FROM python:3.12-slim
RUN useradd --system --no-create-home gateway
COPY --from=build /opt/gateway /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH
USER gateway
EXPOSE 6432
# The gateway drains on SIGTERM.
STOPSIGNAL SIGTERM
ENTRYPOINT ["gateway"]
CMD ["serve", "/etc/gateway/topology.toml"]
