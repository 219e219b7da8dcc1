# The machines that generate: docker build -f server.Dockerfile -t NAME:TAG .
# in the folder of the recipe. In a checkout of AgentFactory, add --build-arg AGENTFACTORY=.
FROM vllm/vllm-openai:v0.32.0
WORKDIR /project
COPY . .
ARG AGENTFACTORY=agentfactory-rl
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${AGENTFACTORY}" && ln -sf "$(command -v python3)" /usr/local/bin/python
ENTRYPOINT []
