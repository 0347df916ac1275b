// Shows conversations: text, thoughts, tool calls and images, by role.

import {formatNumber, make} from './dom.js';

const NAMES = {assistant: 'model', given: 'given to the model'};

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

const part = (one) => {
  if (one.kind === 'image') {
    return make('img', {src: one.src, alt: 'image in the conversation'});
  }
  if (one.kind === 'thought') return make('div', 'words thought', one.text);
  if (one.kind === 'call') {
    return make('div', {class: 'call', role: 'group', 'aria-label': 'tool call'},
      make('b', '', `⚙ ${one.name || 'unreadable call'}`),
      make('pre', '', pretty(one.arguments)));
  }
  return make('div', 'words', one.text);
};

const reward = (value) => value === undefined ? ''
  : make('span', 'reward', `reward ${formatNumber(value)}`);

// Makes the messages of a conversation, with the reward of each of the model's replies.
export const conversation = (messages) => make('div', 'messages', ...messages.map(
  (message) => make('div', `message ${message.role.replace(/\W/g, '')}`,
    make('div', 'role', NAMES[message.role] ?? message.role, reward(message.reward)),
    ...message.parts.map(part))));
