-- Exact arithmetic with whole numbers.
local EXACT = 9007199254740992 -- 2^53: all numbers are below it
local LAST = 4503599627370495 -- 2^52 - 1: the last moment, and the longest wait
local HOUR_US = 3600000000

local function floor_div(a, b)
  return (a - fmod(a, b)) / b
end

local function ceil_div(a, b)
  local rest = fmod(a, b)
  return (a - rest) / b + (rest > 0 and 1 or 0)
end

-- a * b / c for numbers whose product needs more than 53 bits: the quotient rounded down and
-- whether there is a rest. Long multiplication, bit by bit from the top of a; rest < c always, so
-- no intermediate result reaches 2^53. A quotient that does not fit is returned as 2^53 or more,
-- which is enough for all callers.
local function mul_div(a, b, c)
  if a * b < EXACT then
    return floor_div(a * b, c), fmod(a * b, c) > 0
  end
  local whole, b_rest = floor_div(b, c), fmod(b, c)
  local quotient, rest = 0, 0
  for bit = 52, 0, -1 do
    local power = 2 ^ bit
    quotient = quotient * 2
    if rest >= c - rest then -- rest * 2 >= c
      rest, quotient = rest - (c - rest), quotient + 1
    else
      rest = rest * 2
    end
    if a >= power then
      a = a - power
      quotient = quotient + whole
      if rest >= c - b_rest then
        rest, quotient = rest - (c - b_rest), quotient + 1
      else
        rest = rest + b_rest
      end
    end
  end
  return quotient, rest > 0
end

local function mul_div_floor(a, b, c)
  return (mul_div(a, b, c))
end

local function mul_div_ceil(a, b, c)
  local quotient, rest = mul_div(a, b, c)
  return rest and quotient + 1 or quotient
end

-- Whether n is a valid divisor or amount.
local function counts(n)
  return n >= 1 and n < EXACT
end

-- The algorithms, by the first letter of their states. Each is made on first use: a call needs one
-- or two of them, and making all six would take longer than deciding.
local makers = {}
local kernels = setmetatable({}, {
  __index = function(made, letter)
    local make = makers[letter]
    local kernel = make and make()
    made[letter] = kernel
    return kernel
  end,
})
