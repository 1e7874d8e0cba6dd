#include "textflag.h"

// func ID() uintptr
TEXT ·ID(SB), NOSPLIT, $0-8
	MOVD g, R0
	MOVD R0, ret+0(FP)
	RET

// func Thread() uintptr
TEXT ·Thread(SB), NOSPLIT, $0-8
	MOVD 48(g), R0 // g.m
	MOVD R0, ret+0(FP)
	RET
