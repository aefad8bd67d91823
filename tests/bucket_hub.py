"""A loopback double of the Hub's buckets and of the content store behind them, for the real huggingface_hub and hf_xet.

It promises no more than the Hub does: a batch may be applied in part, a request may be lost before or after it took effect, lists may lag,
and nothing is conditional. `faults` is a list of (method, pattern of the path, what): an HTTP status, 'drop' (before) or 'lose' (after it took effect)."""
import json
import re
import struct
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler):
        super().__init__(('127.0.0.1', 0), handler)
        self.url, self.mutex, self.faults, self.log = f'http://127.0.0.1:{self.server_address[1]}', threading.Lock(), [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def body(self):
        if 'chunked' not in self.headers.get('Transfer-Encoding', ''): return self.rfile.read(int(self.headers.get('Content-Length') or 0))
        parts = []
        while size := int(self.rfile.readline().split(b';')[0], 16): parts.append(self.rfile.read(size)); self.rfile.readline()
        self.rfile.readline()
        return b''.join(parts)

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(2)

    def answer(self, status, value=None, **headers):
        if self.loses: return self.hang_up()
        data = value if isinstance(value, bytes) else b'' if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {'Content-Type': 'application/json', 'Content-Length': str(len(data)), **{k.replace('_', '-'): v for k, v in headers.items()}}.items(): self.send_header(name, text)
        self.end_headers()
        if self.command != 'HEAD': self.wfile.write(data)

    def serve(self):
        server, data, self.loses = self.server, self.body(), False
        server.log.append(f'{self.command} {self.path}')
        for fault in list(server.faults):
            method, pattern, what = fault
            if method != self.command or not re.search(pattern, self.path): continue
            server.faults.remove(fault)
            if what == 'drop': return self.hang_up()
            if what == 'lose': self.loses = True; break
            return self.answer(what, {'error': 'injected'})
        self.route(unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query), data)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = serve


def hexed(raw): return ''.join(f'{word:016x}' for word in struct.unpack('<4Q', raw))


class ContentStore(Server):
    "Where the bytes are: chunks in xorbs, files as lists of chunks"
    def __init__(self):
        self.xorbs, self.files, self.by_sha256 = {}, {}, {}
        super().__init__(ContentHandler)

    def add(self, shard):
        "Take the files that a shard describes; False if it names chunks that nobody sent"
        at = 48
        while shard[at:at + 32] != b'\xff' * 32:
            name, (flags, count) = hexed(shard[at:at + 32]), struct.unpack('<II', shard[at + 32:at + 40])
            at += 48
            terms = []
            for _ in range(count):
                _, size, first, end = struct.unpack('<IIII', shard[at + 32:at + 48])
                terms.append((hexed(shard[at:at + 32]), size, first, end))
                at += 48
            at += 48 * count * (flags >> 31 & 1)
            if flags >> 30 & 1: self.by_sha256[hexed(shard[at:at + 32])] = name; at += 48
            if any(xorb not in self.xorbs for xorb, *_ in terms): return False
            self.files[name] = terms
        return True

    def size(self, name): return sum(size for _, size, _, _ in self.files[name])

    def offsets(self, xorb):
        "Where each chunk of a xorb begins"
        data, found, at = self.xorbs[xorb], [0], 0
        while at + 8 <= len(data) and data[at] == 0 and int.from_bytes(data[at + 5:at + 8], 'little'):
            at += 8 + int.from_bytes(data[at + 1:at + 4], 'little')
            found.append(at)
        return found


class ContentHandler(Handler):
    def route(self, path, query, data):
        store = self.server
        if m := re.fullmatch(r'/v1/xorbs/[^/]+/([0-9a-f]{64})', path):
            if self.command == 'HEAD': return self.answer(200 if m[1] in store.xorbs else 404)
            new = m[1] not in store.xorbs
            store.xorbs[m[1]] = data
            return self.answer(200, {'was_inserted': new})
        if path.startswith('/v1/shards'):
            with store.mutex: return self.answer(*((200, {'result': 1}) if store.add(data) else (400, {'error': 'unknown chunks'})))
        if m := re.fullmatch(r'/v1/reconstructions/([0-9a-f]{64})', path): return self.reconstruct(m[1])
        if m := re.fullmatch(r'/blob/([0-9a-f]{64})/.*', path):
            whole, wanted = store.xorbs[m[1]], re.match(r'bytes=(\d+)-(\d+)', self.headers.get('Range') or '')
            if not wanted: return self.answer(200, whole)
            first, last = int(wanted[1]), int(wanted[2])
            return self.answer(206, whole[first:last + 1], Content_Range=f'bytes {first}-{last}/{len(whole)}')
        self.answer(404, {'error': path}) # the client then falls back to the routes above

    def reconstruct(self, name):
        store = self.server
        if name not in store.files: return self.answer(404, {'error': name})
        first, last = 0, store.size(name) - 1
        if m := re.match(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or ''): first, last = int(m[1]), min(last, int(m[2] or last))
        if first > last: return self.answer(416)
        at, skip, terms, places = 0, None, [], {}
        for xorb, size, begin, end in store.files[name]:
            if at + size > first and at <= last:
                if skip is None: skip = first - at
                offsets = store.offsets(xorb)
                terms.append({'hash': xorb, 'unpacked_length': size, 'range': {'start': begin, 'end': end}})
                places.setdefault(xorb, []).append({'range': {'start': begin, 'end': end}, 'url': f'{store.url}/blob/{xorb}/{begin}-{end}', 'url_range': {'start': offsets[begin], 'end': offsets[end] - 1}})
            at += size
        self.answer(200, {'offset_into_first_range': skip, 'terms': terms, 'fetch_info': places})


class BucketHub(Server):
    "Names, sizes and hashes of what is in each bucket; set HF_ENDPOINT to its `url` before huggingface_hub is imported"
    def __init__(self):
        self.content, self.buckets, self.lag = ContentStore(), {}, 0 # lag: so many of the newest files are missing in lists
        super().__init__(BucketHandler)


class BucketHandler(Handler):
    def route(self, path, query, data):
        hub = self.server
        if m := re.fullmatch(r'/api/buckets/([^/]+/[^/]+)/xet-(?:read|write)-token', path):
            until = int(time.time()) + 3600
            return self.answer(200, {'casUrl': hub.content.url, 'exp': until, 'accessToken': 'token'}, X_Xet_Cas_Url=hub.content.url, X_Xet_Access_Token='token', X_Xet_Token_Expiration=str(until))
        if m := re.fullmatch(r'/buckets/([^/]+/[^/]+)/resolve/(.+)', path):
            file = hub.buckets.get(m[1], {}).get(m[2])
            if file is None: return self.answer(404, {'error': 'Entry not found'}, X_Error_Code='EntryNotFound', X_Error_Message='Entry not found')
            return self.answer(200, None, X_Xet_Hash=file['xetHash'], X_Linked_Size=str(file['size']), ETag=f"\"{file['xetHash']}\"", Link=f'<{hub.url}/api/buckets/{m[1]}/xet-read-token>; rel="xet-auth"')
        m = re.fullmatch(r'/api/buckets/([^/]+/[^/]+)(?:/(tree|paths-info|batch)(?:/(.*))?)?', path)
        if not m: return self.answer(404, {'error': path})
        with hub.mutex: self.bucket(m[1], m[2], m[3] or '', query, data)

    def bucket(self, name, verb, prefix, query, data):
        hub = self.server
        if verb is None and self.command == 'POST':
            if name in hub.buckets: return self.answer(409, {'error': 'exists', 'url': f'{hub.url}/buckets/{name}'})
            hub.buckets[name] = {}
            return self.answer(200, {'url': f'{hub.url}/buckets/{name}'})
        files = hub.buckets.get(name)
        if files is None: return self.answer(404, {'error': 'Bucket not found'}, X_Error_Code='RepoNotFound', X_Error_Message='Bucket not found')
        if verb is None: return self.answer(200, {'id': name, 'private': True, 'createdAt': now(), 'size': sum(f['size'] for f in files.values()), 'totalFiles': len(files)})
        if verb == 'paths-info': return self.answer(200, [files[p] for p in json.loads(data)['paths'] if p in files])
        if verb == 'batch': return self.batch(files, data)
        seen = dict(list(files.items())[:len(files) - hub.lag]) if hub.lag else files
        inside = {p: f for p, f in sorted(seen.items()) if p.startswith(prefix)}
        if query.get('recursive', ['false'])[0].lower() == 'true': return self.answer(200, list(inside.values()))
        folders = sorted({prefix + p[len(prefix):].lstrip('/').split('/')[0] for p in inside if '/' in p[len(prefix):].lstrip('/')})
        self.answer(200, [{'type': 'directory', 'path': p, 'uploadedAt': now()} for p in folders] + [f for p, f in inside.items() if '/' not in p[len(prefix):].lstrip('/')])

    def batch(self, files, data):
        "Operation by operation; one that fails leaves the others done"
        done, failed = 0, []
        for line in data.splitlines():
            op = json.loads(line)
            if op['type'] == 'deleteFile': files.pop(op['path'], None)
            else:
                try: size = self.server.content.size(op['xetHash'])
                except KeyError: failed.append({'path': op['path'], 'error': 'unknown hash'}); continue
                files.pop(op['path'], None) # the newest stand last
                files[op['path']] = {'type': 'file', 'path': op['path'], 'size': size, 'xetHash': op['xetHash'], 'mtime': now(), 'uploadedAt': now()}
            done += 1
        self.answer(200 if done or not failed else 422, {'success': not failed, 'processed': done + len(failed), 'succeeded': done, 'failed': failed})


def now(): return datetime.now(timezone.utc).isoformat(timespec='milliseconds').replace('+00:00', 'Z')
