# Index a folder of photos and serve the search page: docs/deploy.md says how to run it.
#   docker build -t fisherhash .
#   docker run --rm -it -p 127.0.0.1:8765:8765 -v "$PWD/photos:/photos:ro" -v fisherhash:/data fisherhash
FROM python:3.13-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src && cp /src/constraints.txt /wheels

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/*.whl)[fast,web,heif]" \
    && rm -rf /wheels && useradd --create-home fisherhash && install -d -o fisherhash /data
# The cache knows which folders an index was filled from, whose images the page shows: it must be
# there in the next container, too. Compiled kernels are there as well.
ENV FISHERHASH_CACHE=/data/.cache/fisherhash NUMBA_CACHE_DIR=/data/.cache/numba
USER fisherhash
WORKDIR /data
VOLUME /data
EXPOSE 8765
# Without arguments: index /photos and serve it. With arguments: that command of fisherhash.
ENTRYPOINT ["sh", "-euc", "[ $# -eq 0 ] || exec fisherhash \"$@\"; fisherhash index sync photos.index /photos; exec fisherhash serve photos.index --host 0.0.0.0", "fisherhash"]
