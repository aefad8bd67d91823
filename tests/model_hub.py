"A loopback double of the Hub's model repositories that takes pushes, for the real huggingface_hub and hf_xet; it promises no more than the Hub does"
import base64
import hashlib
import json
import re
import time

from bucket_hub import ContentStore, Handler, Server

REFUSALS = {'no token': 401, 'no write': 403, 'no owner': 404, 'busy': 503}


class ModelHub(Server):
    "Repositories by name: private or not, and commits (id -> path -> file), the newest last; a file is its bytes, or its place in the content store"
    def __init__(self):
        self.content, self.repos, self.refuse = ContentStore(), {}, None
        super().__init__(ModelHandler)

    def files(self, repo): return list(self.repos[repo]['commits'].values())[-1]


class ModelHandler(Handler):
    def route(self, path, query, data):
        hub = self.server
        if hub.refuse: return self.answer(REFUSALS[hub.refuse], {'error': hub.refuse}, **({'X_Error_Code': 'RepoNotFound'} if hub.refuse == 'no owner' else {}))
        if path == '/api/validate-yaml': return self.answer(200, {'warnings': []} if re.match(r'---\n(?:.+\n)+---\n', json.loads(data)['content']) else {'warnings': [{'message': 'empty metadata'}]})
        if path == '/api/repos/create': return self.create(json.loads(data))
        if m := re.fullmatch(r'/api/models/([^/]+/[^/]+)/xet-(?:read|write)-token/.+', path):
            until = int(time.time()) + 3600
            return self.answer(200, {'casUrl': hub.content.url, 'exp': until, 'accessToken': 'token'}, X_Xet_Cas_Url=hub.content.url, X_Xet_Access_Token='token', X_Xet_Token_Expiration=str(until))
        m = re.fullmatch(r'/(?:api/models/)?([^/]+/[^/]+?)(?:/(preupload|commit|revision|resolve|tree)/([^/]+)(?:/(.+))?)?', path)
        repo = m and hub.repos.get(m[1])
        if repo is None: return self.answer(404, {'error': 'Repository not found'}, X_Error_Code='RepoNotFound')
        if m[2] == 'preupload': return self.answer(200, {'files': [{'path': f['path'], 'uploadMode': 'lfs' if f['path'].endswith('.safetensors') else 'regular', 'shouldIgnore': False} for f in json.loads(data)['files']]})
        if m[2] == 'commit': return self.commit(m[1], repo, data)
        newest = list(repo['commits'])[-1]
        commit = newest if m[3] in (None, 'main') else m[3]
        files = repo['commits'].get(commit)
        if files is None: return self.answer(404, {'error': 'no such revision'}, X_Error_Code='RevisionNotFound')
        if m[2] == 'tree': return self.answer(200, [{'type': 'file', 'path': n, 'size': f['size'], 'oid': f['oid']} for n, f in files.items()])
        if m[2] != 'resolve': return self.answer(200, {'id': m[1], 'sha': commit, 'private': repo['private'], 'siblings': [{'rfilename': n} for n in files]})
        if m[4] not in files: return self.answer(404, {'error': 'Entry not found'}, X_Error_Code='EntryNotFound', X_Repo_Commit=commit)
        self.resolve(m[1], commit, files[m[4]])

    def create(self, wanted):
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        with self.server.mutex:
            if name in self.server.repos: return self.answer(409, {'error': 'You already created this model repo', 'url': f'{self.server.url}/{name}'})
            private = wanted.get('private', wanted.get('visibility') == 'private')
            self.server.repos[name] = {'private': private, 'commits': {hashlib.sha1(name.encode()).hexdigest(): {'.gitattributes': file(b'*.safetensors filter=lfs')}}}
        self.answer(200, {'url': f'{self.server.url}/{name}', 'name': name})

    def commit(self, name, repo, data):
        "Line by line onto the newest commit"
        hub, lines = self.server, [json.loads(line) for line in data.splitlines()]
        with hub.mutex:
            files = dict(hub.files(name))
            for line in lines:
                value = line['value']
                if line['key'] == 'file': files[value['path']] = file(base64.b64decode(value['content']))
                if line['key'] == 'deletedFile': files.pop(value['path'], None)
                if line['key'] == 'lfsFile':
                    if value['oid'] not in hub.content.by_sha256: return self.answer(400, {'error': f"{value['path']} was not uploaded"})
                    files[value['path']] = {'size': value['size'], 'oid': value['oid'], 'xet': hub.content.by_sha256[value['oid']]}
            oid = hashlib.sha1(data + str(len(repo['commits'])).encode()).hexdigest()
            repo['commits'][oid] = files
        self.answer(200, {'commitOid': oid, 'commitUrl': f'{hub.url}/{name}/commit/{oid}', 'hookOutput': ''})

    def resolve(self, name, commit, found):
        known = dict(ETag=f'"{found["oid"]}"', X_Repo_Commit=commit)
        if 'data' in found: return self.answer(200, found['data'], **known)
        self.answer(200, None, **known, X_Xet_Hash=found['xet'], X_Linked_Size=str(found['size']), X_Linked_ETag=f'"{found["oid"]}"', Link=f'<{self.server.url}/api/models/{name}/xet-read-token/{commit}>; rel="xet-auth"')


def file(data): return {'data': data, 'size': len(data), 'oid': hashlib.sha1(data).hexdigest()}
