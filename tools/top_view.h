// tools/top_view.h
//
// What offloadctl top shows of a daemon: a table of its jobs in 80 columns.
//
// Thread safety: pure.
#pragma once

#include <cstddef>
#include <string>

#include "tools/answer.h"
#include "tools/daemons.h"

namespace offload::tools {

inline constexpr size_t kTopColumns = 80;

// At most `columns` characters of UTF-8 of a line.
std::string Clip(const std::string& line, size_t columns);

// Lines of at most kTopColumns columns, each with its end.
std::string TopText(const DaemonAddress& address, const TwoAnswers& answers);
// The same as numbers.
Json DescribeTop(const DaemonAddress& address, const TwoAnswers& answers);

}  // namespace offload::tools
