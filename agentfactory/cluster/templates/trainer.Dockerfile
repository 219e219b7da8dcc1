# The machines that train, and run tools: docker build -f trainer.Dockerfile -t NAME:TAG .
# in the folder of the recipe. In a checkout of AgentFactory, add --build-arg AGENTFACTORY=.
FROM python:3.11-slim
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap build-essential git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /project
COPY . .
ARG AGENTFACTORY=agentfactory-rl
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${AGENTFACTORY}" && if [ -f requirements.txt ]; then pip install --no-cache-dir -r requirements.txt; fi
