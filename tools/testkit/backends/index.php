<?php
// A script for PHP's own server with two resources, /login and /v1/search, which it finds as CGI programs do: by its
// environment. It answers with the resource that was reached and with what it read of the request, a line each.
$path = rawurldecode(explode('?', $_SERVER['REQUEST_URI'])[0]);
$resource = in_array($path, ['/login', '/v1/search'], true) ? $path : 'other';
header('Content-Type: text/plain');
echo "resource: $resource\n";
echo "path: $path\n";
echo 'key: ' . ($_SERVER['HTTP_X_API_KEY'] ?? '') . "\n";
echo 'forwarded for: ' . ($_SERVER['HTTP_X_FORWARDED_FOR'] ?? '') . "\n";
echo 'query: ' . (is_string($_GET['k'] ?? '') ? $_GET['k'] ?? '' : '') . "\n";
echo 'cookie: ' . ($_COOKIE['session'] ?? '') . "\n";
