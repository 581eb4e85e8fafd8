-- Whole numbers, exactly.
local EXACT = 9007199254740992 -- 2^53: everything is below it
local LAST = 4503599627370495 -- 2^52 - 1: the last moment, and the longest wait
local HOUR_US = 3600000000

local function floor_div(a, b)
  return (a - fmod(a, b)) / b
end

local function ceil_div(a, b)
  local rest = fmod(a, b)
  return (a - rest) / b + (rest > 0 and 1 or 0)
end

-- a * b / c for numbers whose product needs more than 53 bits: the quotient rounded down and whether there is a rest.
-- Long multiplication, bit by bit from the top of a; rest < c always, so nothing on the way reaches 2^53. A quotient that
-- does not fit is reported as 2^53 or more, which is all its callers ask.
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

-- What can be divided by and counted with.
local function counts(n)
  return n >= 1 and n < EXACT
end

-- The algorithms, by the letter their states begin with. Each is made when it is first asked for: a call needs one or two of
-- them, and to make all six would take longer than to decide.
local makers = {}
local kernels = setmetatable({}, {
  __index = function(made, letter)
    local make = makers[letter]
    local kernel = make and make()
    made[letter] = kernel
    return kernel
  end,
})
