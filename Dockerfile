# Six images from one file: `docker build --target admin|gateway|dispatcher|jobs|fleet|worker .`

FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 millstream && install --directory --owner millstream /ledger
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY streams streams
COPY registry registry
COPY api api
COPY simulation simulation
COPY gateway gateway
COPY admin admin
COPY dispatcher dispatcher
COPY gpu_worker gpu_worker
COPY jobs jobs
COPY fleet fleet
COPY millstream millstream

FROM base AS slim
RUN pip install --constraint constraints.txt .
USER millstream
ENTRYPOINT ["python", "-m", "millstream"]

FROM slim AS admin
EXPOSE 9100
CMD ["admin", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

FROM slim AS gateway
EXPOSE 8080 9100
CMD ["gateway", "--host", "0.0.0.0", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

FROM slim AS dispatcher
EXPOSE 9100
CMD ["dispatcher", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

FROM slim AS jobs
EXPOSE 9100
CMD ["jobs", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

FROM slim AS fleet
EXPOSE 9100
CMD ["fleet", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

FROM base AS worker
RUN pip install --constraint constraints.txt '.[worker,remote]'
USER millstream
EXPOSE 9100
ENTRYPOINT ["python", "-m", "millstream"]
CMD ["worker", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]
