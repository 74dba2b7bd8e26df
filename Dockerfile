# Contains the program, its locked dependencies, and what starts most MCP servers: npx (Node.js) and uvx (uv).
# Mount the society's folder at /society.
FROM python:3.13-slim AS build
RUN pip install --no-cache-dir uv==0.13.7
WORKDIR /source
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY src src
RUN UV_PROJECT_ENVIRONMENT=/opt/coterie UV_PYTHON_DOWNLOADS=never \
    uv sync --frozen --no-dev --no-editable --compile-bytecode --extra postgres --extra otel \
    --python /usr/local/bin/python

FROM node:24-slim AS node

FROM python:3.13-slim
COPY --from=build /opt/coterie /opt/coterie
COPY --from=build /usr/local/bin/uv /usr/local/bin/uvx /usr/local/bin/
COPY --from=node /usr/local/bin/node /usr/local/bin/node
COPY --from=node /usr/local/lib/node_modules/npm /usr/local/lib/node_modules/npm
# Downloaded MCP servers are kept in the society's folder: compose.yaml makes the rest read-only, and Docker mounts /tmp
# without the right to execute. As files, because MCP servers inherit only PATH, HOME and a few other variables.
# At the end each program is started, so that a library that the other base image lacks fails the build.
RUN ln -s ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm \
    && ln -s ../lib/node_modules/npm/bin/npx-cli.js /usr/local/bin/npx \
    && mkdir -p /usr/local/etc /etc/uv \
    && printf 'cache=/society/.cache/npm\nupdate-notifier=false\n' > /usr/local/etc/npmrc \
    && printf 'cache-dir = "/society/.cache/uv"\npython-downloads = "never"\n' > /etc/uv/uv.toml \
    && node --version && npx --version && uvx --version
ENV PATH=/opt/coterie/bin:$PATH COTERIE_DIR=/society PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Any other user works as well; root is never needed.
USER 1000:1000
EXPOSE 8642
ENTRYPOINT ["coterie"]
CMD ["serve", "--host", "0.0.0.0"]
