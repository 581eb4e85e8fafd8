// A server of Node with two resources, /login and /v1/search, routed as its own documentation does: by `new URL`. It
// answers with the resource that was reached and with what it read of the request, a line each.
const http = require("node:http");

const [host, port] = process.argv[2].split(":");

http
  .createServer((request, response) => {
    let url;
    try {
      url = new URL(request.url, "http://localhost");
    } catch {
      response.statusCode = 400;
      return response.end();
    }
    const resource = ["/login", "/v1/search"].includes(url.pathname) ? url.pathname : "other";
    const cookies = Object.fromEntries((request.headers.cookie ?? "").split(/; */).map((pair) => pair.split("=")));
    const lines = [
      `resource: ${resource}`,
      `path: ${url.pathname}`,
      `key: ${request.headers["x-api-key"] ?? ""}`,
      `query: ${url.searchParams.get("k") ?? ""}`,
      `cookie: ${cookies.session ?? ""}`,
    ];
    response.end(lines.join("\n") + "\n");
  })
  .listen(Number(port), host);
