# A Flask application with two resources, /login and /v1/search. It answers with the resource that was reached and with
# what it read of the request, a line each. Run under gunicorn.
from flask import Flask, request

app = Flask(__name__)


def serve(resource):
    lines = [
        f"resource: {resource}",
        f"path: {request.path}",
        f"key: {request.headers.get('X-Api-Key', '')}",
        f"query: {request.args.get('k', '')}",
        f"cookie: {request.cookies.get('session', '')}",
    ]
    return "\n".join(lines) + "\n", 200, {"Content-Type": "text/plain"}


@app.get("/login")
def login():
    return serve("/login")


@app.get("/v1/search")
def search():
    return serve("/v1/search")


@app.get("/", defaults={"rest": ""})
@app.get("/<path:rest>")
def other(rest):
    return serve("other")
