// What a product with nothing behind it is made for, as both cores' text.py write it; see text/source.py.
#pragma once

constexpr bool kSplit = false;
constexpr int kSplitK = 2;
