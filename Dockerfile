# A node, a gateway, and what `kvtier` can do besides. compose.yaml builds and runs it; docs/deploy.md tells how.
FROM python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1 AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY tiering tiering
COPY schema schema
RUN python -m venv /opt/kvtier \
 && /opt/kvtier/bin/pip install --no-cache-dir --no-compile ".[node,mesh,bootstrap]" \
 && /opt/kvtier/bin/pip uninstall -y pip \
 && /opt/kvtier/bin/python -m compileall -q /opt/kvtier/lib

FROM python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
COPY --from=build /opt/kvtier /opt/kvtier
ENV PATH=/opt/kvtier/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Whoever runs it owns the volumes: like /tmp, both folders take any user (`user:` in compose.yaml, `runAsUser` in Kubernetes).
RUN groupadd --gid 7878 kvtier && useradd --uid 7878 --gid 7878 --no-create-home kvtier \
 && install -d -m 1777 /var/lib/kvtier /run/kvtier
USER 7878:7878
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvtier"]
CMD ["serve"]
