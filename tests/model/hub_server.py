"""A small stand-in for the HTTP API of the Hugging Face Hub: it makes, fills and serves models."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: name to a list of (commit, files)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.private, self.downloads = {}, {}, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, name, files):
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.models.setdefault(name, []).append((digest, files))
        return digest


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def _send(self, status, content=b"", **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _revision(self, name, revision):
        """The (commit, files) of a revision; sends the error otherwise."""
        commits = self.server.models.get(name)
        if commits is None:
            self._send(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
            return None
        found = [one for one in commits if one[0] == revision]
        found = commits if revision == "main" else found
        if not found:
            self._send(404, {"error": "not found"}, X_Error_Code="RevisionNotFound")
            return None
        return found[-1]

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            name, rest = "/".join(path[2:4]), path[4:]
            found = self._revision(name, rest[1] if rest else "main")
            if found is None:
                return
            commit, files = found
            if rest[:1] == ["tree"]:
                listed = [
                    {"type": "file", "path": file, "size": len(data), "oid": _oid(data)}
                    for file, data in files.items()
                ]
                self._send(200, listed)
                return
            siblings = [{"rfilename": file} for file in files]
            self._send(200, {"id": name, "sha": commit, "private": False, "siblings": siblings})
            return
        if path[2:3] != ["resolve"]:
            self._send(404, {"error": "not found"})
            return
        name, revision, file = "/".join(path[:2]), path[3], "/".join(path[4:])
        found = self._revision(name, revision)
        if found is None:
            return
        commit, files = found
        if file not in files:
            self._send(404, {"error": "no"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        if self.command == "GET":
            self.server.downloads.append(file)
        self._send(200, files[file], ETag=f'"{_oid(files[file])}"', X_Repo_Commit=commit)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/api/validate-yaml"):
            self._send(200, {"errors": [], "warnings": []})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid user token."})
            return
        path = self.path.partition("?")[0].strip("/").split("/")
        if path == ["api", "repos", "create"]:
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
            known = name in self.server.models
            if not known:
                private = wanted.get("private") or wanted.get("visibility") == "private"
                self.server.private[name] = private
                self.server.commit(name, {})
            self._send(409 if known else 200, {"url": f"{self.server.url}/{name}"})
            return
        name, verb = "/".join(path[2:4]), path[4]
        if verb == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self._send(200, {"files": files})
            return
        files = dict(self.server.models[name][-1][1])
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.server.commit(name, files)
        url = f"{self.server.url}/{name}/commit/{commit}"
        self._send(200, {"success": True, "commitOid": commit, "commitUrl": url})


def _oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hub():
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
