# gradserve in a container: docker build -t gradserve . (compose.yaml puts nginx in front of it)
# With OpenTelemetry: docker build -t gradserve --build-arg EXTRAS=[graphs,otel,postgres,simdjson] .
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE gradserve.py ./
COPY service service
ARG EXTRAS=[graphs,postgres,simdjson]
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The environment gets neither pip nor setuptools, nor the packages' own tests.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /venv && \
    pip --python /venv/bin/python install --quiet ".$EXTRAS" && \
    find /venv -type d -name tests -path '*/scipy/*' -prune -exec rm -r {} + && \
    mkdir /data

FROM ${BASE}
ARG VERSION=0.4.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gradserve" \
      org.opencontainers.image.description="Counts every gradient once while workers die, lag and join: gradient accumulation, kernels and ONNX training over HTTP" \
      org.opencontainers.image.url="https://github.com/gradserve/gradserve" \
      org.opencontainers.image.documentation="https://github.com/gradserve/gradserve/tree/main/docs" \
      org.opencontainers.image.source="https://github.com/gradserve/gradserve" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /venv /venv
COPY --from=build --chown=10001:10001 /data /data
COPY --from=build --chown=10001:10001 /data /run/gradserve
COPY deploy/healthcheck.py /usr/local/share/gradserve/
ENV PATH=/venv/bin:$PATH \
    GRADSERVE_HOST=0.0.0.0 \
    GRADSERVE_PORT=8000 \
    GRADSERVE_STORE=lmdb:/data \
    GRADSERVE_KEYS=/run/secrets/gradserve_keys
USER 10001:10001
WORKDIR /
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python", "/usr/local/share/gradserve/healthcheck.py"]
ENTRYPOINT ["gradserve"]
CMD ["serve"]
