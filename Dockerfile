# docker build -t fisherhash . && docker run --rm -v "$PWD:/data" fisherhash index sync photos.index photos
FROM python:3.13-slim
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src && rm -rf /src \
    && useradd --create-home fisherhash
USER fisherhash
WORKDIR /data
ENTRYPOINT ["fisherhash"]
CMD ["--help"]
