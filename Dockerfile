# Contains the program and its locked dependencies. Mount the society's folder at /society.
FROM python:3.13-slim AS build
RUN pip install --no-cache-dir uv==0.13.7
WORKDIR /source
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY src src
RUN UV_PROJECT_ENVIRONMENT=/opt/coterie UV_PYTHON_DOWNLOADS=never \
    uv sync --frozen --no-dev --no-editable --compile-bytecode --extra postgres --extra otel \
    --python /usr/local/bin/python

FROM python:3.13-slim
COPY --from=build /opt/coterie /opt/coterie
ENV PATH=/opt/coterie/bin:$PATH COTERIE_DIR=/society PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Any other user works as well; root is never needed.
USER 1000:1000
EXPOSE 8642
ENTRYPOINT ["coterie"]
CMD ["serve", "--host", "0.0.0.0"]
