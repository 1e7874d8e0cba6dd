package cufileapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) SetStatsLevel(level int32) Result {
	return l.Call(FuncSetStatsLevel, dl.Get().In(uintptr(level)))
}

func (l *Lib) GetStatsLevel() (int32, Result) {
	v, r := l.Call1(FuncGetStatsLevel, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) StatsStart() Result { return l.Call(FuncStatsStart, dl.Get()) }

func (l *Lib) StatsStop() Result { return l.Call(FuncStatsStop, dl.Get()) }

func (l *Lib) StatsReset() Result { return l.Call(FuncStatsReset, dl.Get()) }

func (l *Lib) GetStatsL1(s *StatsLevel1) Result {
	return l.Call(FuncGetStatsL1, dl.Get().Ptr(unsafe.Pointer(s)))
}

func (l *Lib) GetStatsL2(s *StatsLevel2) Result {
	return l.Call(FuncGetStatsL2, dl.Get().Ptr(unsafe.Pointer(s)))
}

func (l *Lib) GetStatsL3(s *StatsLevel3) Result {
	return l.Call(FuncGetStatsL3, dl.Get().Ptr(unsafe.Pointer(s)))
}
