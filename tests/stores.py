"Every kind of store there is, on servers of this machine"
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

KEYS = dict(AWS_ACCESS_KEY_ID='testaccess', AWS_SECRET_ACCESS_KEY='testsecret1', AWS_REGION='us-east-1')


def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]


def make_bucket(url, name):
    "Create an S3 bucket on a server that does not insist on signatures, waiting for it to come up"
    for _ in range(900):
        try: return urllib.request.urlopen(urllib.request.Request(f'{url}/{name}', method='PUT'), timeout=5).status
        except urllib.error.HTTPError as e:
            if e.code == 409: return 409
        except OSError: pass
        time.sleep(0.1)
    raise TimeoutError(f'{url} does not come up')


class Proxy(ThreadingHTTPServer):
    "In front of a server: `faults` holds (method, part of the path, what), where what is a status, 'drop' (before it arrives) or 'lose' (its answer)"
    daemon_threads = True

    def __init__(self, url):
        self.target, self.faults, self.log = urlsplit(url), [], []
        super().__init__(('127.0.0.1', 0), Passing)
        self.url = f'http://127.0.0.1:{self.server_address[1]}'
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Passing(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(2)

    def serve(self):
        proxy, body = self.server, self.rfile.read(int(self.headers.get('Content-Length') or 0))
        proxy.log.append(f'{self.command} {self.path}')
        fault = next((f for f in proxy.faults if f[0] == self.command and f[1] in self.path), None)
        if fault: proxy.faults.remove(fault)
        if fault and fault[2] == 'drop': return self.hang_up()
        if fault and isinstance(fault[2], int): return self.reply(fault[2], {'Content-Length': '0'}, b'')
        connection = HTTPConnection(proxy.target.hostname, proxy.target.port, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        if fault: return self.hang_up()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ('transfer-encoding', 'connection', 'content-length', 'date', 'server')}
        self.reply(answer.status, {**headers, 'Content-Length': str(len(data)) if self.command != 'HEAD' else answer.getheader('Content-Length', '0')}, data)

    def reply(self, status, headers, data):
        self.send_response(status)
        for name, value in headers.items(): self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD': self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve


class Moto:
    "moto's S3"
    def __init__(self, folder):
        from moto.server import ThreadedMotoServer
        self.server = ThreadedMotoServer('127.0.0.1', 0, verbose=False)
        self.server.start()
        self.url = 'http://{}:{}'.format(*self.server.get_host_and_port())
        make_bucket(self.url, 'lessons')

    def close(self): self.server.stop()


class Process:
    "A server that is a program"
    def __init__(self, call, url, **popen):
        self.process, self.url = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **popen), url

    def close(self):
        self.process.terminate()
        try: self.process.wait(20)
        except subprocess.TimeoutExpired: self.process.kill(); self.process.wait()


def program(name):
    "A program that a Python package brought along"
    return shutil.which(name) or shutil.which(os.path.join(os.path.dirname(sys.executable), name))


class Seaweed(Process):
    "SeaweedFS, a real object store"
    def __init__(self, folder):
        ports = [free_port() for _ in range(4)]
        names = ('-master.port', '-volume.port', '-filer.port', '-s3.port')
        super().__init__([program('weed'), 'server', f'-dir={folder}', '-s3', '-ip=127.0.0.1', '-ip.bind=127.0.0.1', *(f'{n}={p}' for n, p in zip(names, ports))], f'http://127.0.0.1:{ports[3]}')
        make_bucket(self.url, 'lessons')


class Rclone(Process):
    "rclone's S3, which takes 'if absent' for a decoration"
    def __init__(self, folder):
        port = free_port()
        os.makedirs(f'{folder}/lessons')
        super().__init__([program('rclone'), 'serve', 's3', folder, '--addr', f'127.0.0.1:{port}', '--auth-key', f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"], f'http://127.0.0.1:{port}')
        for _ in range(300):
            with socket.socket() as s:
                if s.connect_ex(('127.0.0.1', port)) == 0: return
            time.sleep(0.1)


def s3_environment(url): return {**KEYS, 'AWS_ENDPOINT_URL': url}
def new_name(): return f'run-{uuid.uuid4().hex[:8]}'
