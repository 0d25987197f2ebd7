"""fp32 as fp16 planes: conversion, guards, gradients."""
