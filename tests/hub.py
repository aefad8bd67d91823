"A loopback double of the Hub's model repositories, for the real huggingface_hub; it promises no more than the Hub does"
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REFUSALS = {'no token': (401, None), 'gated': (403, 'GatedRepo'), 'no repository': (404, 'RepoNotFound'), 'no revision': (404, 'RevisionNotFound'), 'busy': (503, None)}


class Hub(ThreadingHTTPServer):
    "One repository: branches point to commits, commits to folders of files"
    daemon_threads = True

    def __init__(self, name):
        super().__init__(('127.0.0.1', 0), Handler)
        self.name, self.commits, self.branches, self.refuse, self.log, self.authorized = name, {}, {}, None, [], []
        self.url = f'http://127.0.0.1:{self.server_address[1]}'
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def push(self, folder, branch='main'):
        "Make the files of `folder` the newest commit of a branch; its id"
        files = {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}
        commit = hashlib.sha1(b''.join(files.values())).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def asked_for(self, ending):
        "Whether a file with this ending was fetched"
        return any(path.endswith(ending) for method, path in self.log if method == 'GET')


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def answer(self, status, body=b'', **headers):
        self.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **headers}.items(): self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command == 'GET': self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path))
        hub.authorized.append('Authorization' in self.headers)
        if hub.refuse == 'drop':
            self.close_connection = True
            return self.connection.shutdown(2)
        if hub.refuse:
            status, code = REFUSALS[hub.refuse]
            return self.answer(status, json.dumps({'error': hub.refuse}).encode(), **{'X_Error_Code': code, 'X_Error_Message': hub.refuse} if code else {})
        found = re.fullmatch(rf'/(?:api/models/)?{hub.name}(?:/(revision|resolve|tree)/([^/]+))?(?:/(.+))?', path)
        revision = (found and found[2]) or 'main'
        commit = hub.branches.get(revision, revision)
        if not found: return self.answer(404, X_Error_Code='RepoNotFound')
        if commit not in hub.commits: return self.answer(404, X_Error_Code='RevisionNotFound')
        files = hub.commits[commit]
        if found[1] == 'tree': return self.answer(200, json.dumps([{'type': 'file', 'path': n, 'size': len(d), 'oid': hashlib.sha1(d).hexdigest()} for n, d in files.items()]).encode())
        if found[1] != 'resolve': return self.answer(200, json.dumps({'id': hub.name, 'sha': commit, 'siblings': [{'rfilename': n} for n in files]}).encode())
        if found[3] not in files: return self.answer(404, X_Error_Code='EntryNotFound', X_Repo_Commit=commit)
        return self.answer(200, files[found[3]], ETag=f'"{hashlib.sha256(files[found[3]]).hexdigest()}"', X_Repo_Commit=commit)

    do_HEAD = do_GET
