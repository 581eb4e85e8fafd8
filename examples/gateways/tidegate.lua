-- HAProxy asks Tidegate: `http-request lua.tidegate`, after `lua-load tidegate.lua http://HOST:PORT`.

local tidegate = (... or "http://127.0.0.1:8080") .. "/v1/auth"
local TIMEOUT_MS = 500      -- for an answer
local FAIL_OPEN = true      -- without an answer: let pass (true), or answer 503 (false)
local TOKEN = nil           -- if Tidegate wants one

-- Not passed on: what is about the client's connection or body, and what is said here and must not be the client's.
local OWN = {}
for name in ([[
  connection content-length expect host keep-alive proxy-connection te trailer transfer-encoding upgrade
  x-forwarded-for x-forwarded-host x-forwarded-method x-forwarded-uri x-original-method x-original-uri x-original-url
  x-tidegate-token
]]):gmatch("%S+") do OWN[name] = true end

-- What the client is to see of an answer that lets it pass, and in which variable.
local SEEN = {
  ["ratelimit-policy"] = "txn.rl_policy",
  ["ratelimit"] = "txn.rl",
  ["x-ratelimit-limit"] = "txn.rl_limit",
  ["x-ratelimit-remaining"] = "txn.rl_left",
  ["x-ratelimit-reset"] = "txn.rl_reset",
}

-- HAProxy counts the values of a header from 0.
local function values(from)
  local list = {}
  for at = 0, 100 do
    if from[at] == nil then break end
    list[#list + 1] = from[at]
  end
  return list
end

local function answer(txn, status, headers, body)
  local reply = txn:reply({ status = status, body = body })
  for name, list in pairs(headers) do
    if not OWN[name] then
      for _, value in ipairs(list) do reply:add_header(name, value) end
    end
  end
  txn:done(reply)
end

core.register_action("tidegate", { "http-req" }, function(txn)
  local sent = txn.http:req_get_headers()
  local headers = {}
  for name, list in pairs(sent) do
    if not OWN[name] then headers[name] = values(list) end
  end
  headers["x-forwarded-method"] = { txn.f:method() }
  headers["x-forwarded-uri"] = { txn.f:pathq() }
  headers["x-forwarded-host"] = { sent["host"] and sent["host"][0] or "none" }
  headers["x-forwarded-for"] = { txn.f:src() }
  if TOKEN then headers["x-tidegate-token"] = { TOKEN } end

  local answered = core.httpclient():get({ url = tidegate, headers = headers, timeout = TIMEOUT_MS })
  local status = answered and answered.status or 0
  if status >= 200 and status < 300 then
    for name, variable in pairs(SEEN) do
      local list = answered.headers[name]
      if list then txn:set_var(variable, values(list)[1]) end
    end
  elseif status == 0 or status >= 502 then
    if not FAIL_OPEN then answer(txn, 503, {}, "") end
  else
    local own = {}
    for name, list in pairs(answered.headers) do own[name] = values(list) end
    answer(txn, status, own, answered.body)
  end
end)
