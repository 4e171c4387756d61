// zero3/trainer_marks.h
//
// What trainers other than an attached C++ program put at the beginning of the state that they keep
// in a job, where it says something of the job that others have to know.
#pragma once

#include <string_view>

namespace offload::zero3 {

// From Python (python/offloadd/handle.py): its optimizers are of several kinds, and what follows
// tells whose is which.
inline constexpr std::string_view kMarkOfKinds = "OFDPY\x02";

// From offloadctl run, as a whole: the job has a note of every optimizer that ran in the program's
// process. One that there is none of has not stepped, and begins.
inline constexpr char kNotesForeign[] = "offloadctl run 1";

}  // namespace offload::zero3
