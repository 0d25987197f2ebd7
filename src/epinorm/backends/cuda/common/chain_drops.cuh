// What kernels need of each seed of a chain, found once, at a kernel's start: in registers that a warp
// shares, so that they cost it none, and a key's ten steps are computed once for all lanes.
template <typename T>
struct Drops {
  struct {
    Seed seed;
    unsigned last;
    T scale;
  } of[kSlots];
};

// A value that is the same in all lanes, all of which are here.
EPINORM_FUNCTION unsigned of_warp(unsigned value) { return __reduce_or_sync(0xffffffffu, value); }
EPINORM_FUNCTION float of_warp(float value) { return __uint_as_float(of_warp(__float_as_uint(value))); }
EPINORM_FUNCTION double of_warp(double value) { return value; }

EPINORM_FUNCTION constexpr bool is_seed(int i) {
  return i < kOperands && !is_channel(i) && !is_element(i) && !is_row(i);
}

template <typename T>
EPINORM_FUNCTION Drops<T> drops_of(Constants<T> constants, const void* const (&operands)[kSlots]) {
  Drops<T> drops;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (!is_seed(i)) continue;
    const Seed seed = *static_cast<const Seed*>(operands[i]);
    const T keep = constants.of[keep_of(i)];
    drops.of[i] = {{of_warp(seed.key), of_warp(seed.first_row)},
                   of_warp(last_kept(float(keep))),
                   of_warp(scale_of_kept(keep))};
  }
  return drops;
}

// What dropout i multiplies the value by in an even column, or in the one behind it.
template <typename T>
EPINORM_FUNCTION T factor_of(const Drops<T>& drops, int i, long long row, int even_column, int odd) {
  const RandomPair words = random_words(drops.of[i].seed, row, even_column / 2);
  return (odd ? words.odd : words.even) <= drops.of[i].last ? drops.of[i].scale : T(0);
}
