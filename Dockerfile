# A node. Built and run by compose.yaml; see docs/operations.md for running one without containers.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY tiering tiering
COPY schema schema
RUN python -m venv /opt/kvtier && /opt/kvtier/bin/pip install --no-cache-dir ".[node]"

FROM python:3.11.13-slim-bookworm
COPY --from=build /opt/kvtier /opt/kvtier
ENV PATH=/opt/kvtier/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 7878 kvtier && install -d -o kvtier /var/lib/kvtier /run/kvtier
USER kvtier
VOLUME /var/lib/kvtier
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvtier"]
CMD ["serve"]
