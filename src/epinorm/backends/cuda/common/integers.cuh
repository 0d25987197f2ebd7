// Short names for the integers of a machine word's width.
#pragma once
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
